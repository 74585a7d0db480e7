"""Evaluation: episodes as records on disk, checkpoints by any road, validation sets, tables."""
