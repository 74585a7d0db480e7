"""Evaluation of checkpoints on validation sets, tables of the results, and export of weights."""
