"""Loggers, and what MLflow has not got yet."""
