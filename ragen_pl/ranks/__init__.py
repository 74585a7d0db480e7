"""Processes of a run that end together."""
