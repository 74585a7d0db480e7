"""Optimizer steps that are repeated from a file or a checkpoint."""
