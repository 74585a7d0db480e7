"""Recorded episodes and curves of runs, as files and pages."""
