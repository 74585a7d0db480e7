"""Loggers, and records that are not sent to MLflow yet."""
