"""Advantage estimators as pure functions; `algorithms.estimators` wraps them for Hydra."""
