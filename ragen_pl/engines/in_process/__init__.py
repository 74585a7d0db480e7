"""The engine that samples with the trainer's own weights."""
