"""A proportion of independent trials with its interval. Without torch: the live view needs it too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

# Quantile of the normal distribution for a 95% interval.
Z = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Proportion:
    """A proportion with its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2

    def metrics(self, name: str) -> dict[str, float]:
        """Return the proportion and its interval as `name`, `name_low` and `name_high`."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def wilson(proportion: float, *, count: float) -> Proportion:
    """Return a proportion of `count` independent trials with its 95% interval (Wilson, 1927).

    >>> interval = wilson(0.5, count=400)
    >>> round(interval.low, 4), round(interval.high, 4)
    (0.4512, 0.5488)
    >>> wilson(1.0, count=100).high
    1.0
    """
    square = Z**2 / count
    center = (proportion + square / 2) / (1 + square)
    spread = (
        Z * math.sqrt(proportion * (1 - proportion) / count + square / (4 * count)) / (1 + square)
    )
    low = max(0.0, min(proportion, center - spread))
    high = min(1.0, max(proportion, center + spread))
    return Proportion(proportion, low, high)


def clustered_wilson(
    proportion: float, *, variance: float, groups: float, samples: float
) -> Proportion:
    """Return a proportion over samples of groups, whose samples are correlated, with its 95% interval.

    It is Wilson's for the number of independent trials that would give the variance, at least the number of groups and
    at most that of samples.

    Args:
        proportion: Fraction of successes over all samples.
        variance: Variance of that fraction, estimated between groups.
        groups: Number of groups.
        samples: Number of samples of all groups.
    """
    trials = proportion * (1 - proportion) / variance if variance > 0 else groups
    return wilson(proportion, count=min(max(trials, groups), samples))


def cluster_variance(
    mean: float,
    *,
    clusters: float,
    samples: float,
    size_squares: float,
    products: float,
    squares: float,
) -> float:
    """Return the cluster-robust variance of a mean over samples of clusters, whose samples are correlated.

    G / (G - 1) sum_g (s_g - n_g mean)^2 / N^2 of G clusters with n_g samples of sum s_g, N in all (Liang and Zeger,
    1986).

    Args:
        mean: Mean of all samples.
        clusters: G, two or more.
        samples: N.
        size_squares: Sum of n_g^2.
        products: Sum of n_g s_g.
        squares: Sum of s_g^2.

    >>> cluster_variance(0.5, clusters=2, samples=4, size_squares=8, products=4, squares=4)
    0.25
    """
    deviations = squares - 2 * mean * products + mean**2 * size_squares
    # rounding; NaN stays
    deviations = 0.0 if deviations < 0 else deviations
    return deviations * clusters / (clusters - 1) / samples**2


def success_interval(metrics: Mapping[str, float], prefix: str = "") -> Proportion:
    """Return the success with the interval that was recorded, else with that of independent episodes.

    >>> success_interval({"success": 0.5, "episodes": 400}).low == wilson(0.5, count=400).low
    True
    """
    success = metrics[f"{prefix}success"]
    low, high = metrics.get(f"{prefix}success_low"), metrics.get(f"{prefix}success_high")
    if low is not None and high is not None:
        return Proportion(success, low, high)
    return wilson(success, count=metrics.get(f"{prefix}episodes") or math.inf)


def reports_success(metrics: Mapping[str, float], prefix: str = "") -> bool:
    """Return whether the environment says whether its task is solved.

    Lightning keeps the metric that says it does not, also where a later measurement has a success.

    >>> [reports_success({"success": success, "success_reported": 0.0}) for success in (0.0, 0.5)]
    [False, True]
    """
    return metrics.get(f"{prefix}success_reported") != 0.0 or metrics[f"{prefix}success"] > 0


def objective(metrics: Mapping[str, float], prefix: str = "") -> float | None:
    """Return the objective of sweeps: the success, or the return where the environment reports no success.

    >>> objective({"val/success": 0.0, "val/return": 2.5, "val/success_reported": 0.0}, "val/")
    2.5
    """
    name = "success" if reports_success(metrics, prefix) else "return"
    return metrics.get(f"{prefix}{name}")
