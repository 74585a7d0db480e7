"""torchmetrics that hold sums and counts, so that any split over steps and ranks gives the same metrics."""
