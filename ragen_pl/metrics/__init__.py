"""Metrics of episodes and updates. They hold sums and counts: any split over steps and ranks gives the same result."""
