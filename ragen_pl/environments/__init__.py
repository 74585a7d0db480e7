"""Environments of a rollout: their processes, time limits and failures, and the check before a run."""
