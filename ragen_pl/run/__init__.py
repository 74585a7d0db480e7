"""The job: components, folder, checkpoints, loggers and ranks of a training run."""
