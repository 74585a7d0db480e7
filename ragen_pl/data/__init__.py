"""Trajectories as tensors, and the DataModules that stream them."""
