"""Files of checkpoints and the run's folder."""
