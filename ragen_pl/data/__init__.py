"""Trajectories as tensors, and the DataModules that provide them."""
