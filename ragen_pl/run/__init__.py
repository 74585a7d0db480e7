"""One training run: its checks, folder, components, training, checkpoints and tracking."""
