"""Jobs of SLURM."""
