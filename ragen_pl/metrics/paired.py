"""Difference of two sets of runs that have played the same episodes, with a bootstrap interval. numpy only.

Runs are summarized by their interquartile mean, and the interval resamples runs as Agarwal et al. (2021,
arXiv 2108.13264) do, within each side. Their tasks are fixed; here the initial states are a sample too, the same one
for all runs, and are drawn anew in each resample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
_LEVEL = 0.95
# values of a block of resamples
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Paired:
    """A metric of two sides and their difference.

    Attributes:
        left: Of the first side.
        right: Of the second side.
        difference: Of the first less the second.
    """

    left: Estimate
    right: Estimate
    difference: Estimate


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean along the last axis without the lowest and the highest quarter of the values.

    A quarter is rounded down: of fewer than four values it is their mean.

    >>> float(interquartile_mean(np.array([0.0, 0.4, 0.5, 0.6, 0.7])))
    0.5
    >>> float(interquartile_mean(np.array([0.0, 0.3])))
    0.15
    """
    count = values.shape[-1]
    cut = count // 4
    return np.asarray(np.sort(values, axis=-1)[..., cut : count - cut].mean(-1))


def paired_difference(
    left: np.ndarray,
    right: np.ndarray,
    *,
    states: Sequence[object],
    same_seeds: bool,
    is_success: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Paired:
    """Return a metric of two sides and their difference, with bootstrap percentile intervals.

    Each resample draws initial states, all episodes of a state together and the same ones for every run, and then runs
    of each side. A side of one run has nothing to draw: its interval is that of this run.

    The bootstrap of successes has two more states, each solved by all runs of one side alone, as in the interval of
    Bonett and Price (2012). Without them it is too short where the success of few states differs, and has no width
    where that of none does.

    Args:
        left: Values of the first side, `[runs, episodes]`.
        right: Values of the second side, `[runs, episodes]`.
        states: Initial state of each episode, the same for all runs.
        same_seeds: Whether the runs of both sides are pairs too, as those from the same seeds; they are then drawn
            together.
        is_success: Whether the values are 0 and 1.
        resamples: Number of resamples.
        seed: Seed of the draws.

    Raises:
        ValueError: There are no episodes, or the shapes don't fit.
    """
    if left.shape[1] != right.shape[1] or left.shape[1] != len(states) or not len(states):
        raise ValueError(
            f"found {left.shape[1]} and {right.shape[1]} episodes of {len(states)} states, expected as many of each"
        )
    if same_seeds and len(left) != len(right):
        raise ValueError(f"found {len(left)} and {len(right)} runs, expected pairs of them")
    numbers = {state: number for number, state in enumerate(dict.fromkeys(states))}
    of_state = np.array([numbers[state] for state in states])
    counts = np.bincount(of_state).astype(float)
    sums = np.stack([np.bincount(of_state, values) for values in (*left, *right)], axis=1)
    if is_success:
        counts = np.append(counts, [counts.mean()] * 2)
        solved = [True] * len(left) + [False] * len(right)
        sums = np.vstack([sums, counts[-1] * np.array([solved, np.logical_not(solved)])])
    generator = np.random.default_rng(seed)
    drawn: list[np.ndarray] = []
    block = max(1, _BLOCK // len(counts))
    for first in range(0, resamples, block):
        number = min(block, resamples - first)
        times = generator.multinomial(
            len(counts), np.full(len(counts), 1 / len(counts)), size=number
        )
        means = (times @ sums) / (times @ counts)[:, None]
        chosen_left = generator.integers(len(left), size=(number, len(left)))
        chosen_right = generator.integers(len(right), size=(number, len(right)))
        if same_seeds:
            chosen_right = chosen_left
        drawn.append(
            np.stack(
                [
                    interquartile_mean(np.take_along_axis(part, chosen, axis=1))
                    for part, chosen in (
                        (means[:, : len(left)], chosen_left),
                        (means[:, len(left) :], chosen_right),
                    )
                ]
            )
        )
    lefts, rights = np.concatenate(drawn, axis=1)
    value_left = float(interquartile_mean(left.mean(1)))
    value_right = float(interquartile_mean(right.mean(1)))
    return Paired(
        left=_estimate(value_left, lefts),
        right=_estimate(value_right, rights),
        difference=_estimate(value_left - value_right, lefts - rights),
    )


def _estimate(value: float, drawn: np.ndarray) -> Estimate:
    tail = 100 * (1 - _LEVEL) / 2
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return Estimate(value, min(float(low), value), max(float(high), value))


def sign_test(more: int, less: int) -> float:
    """Return the two-sided p-value of so many positive and negative differences (exact McNemar test).

    >>> round(sign_test(9, 1), 4), sign_test(0, 0)
    (0.0215, 1.0)
    """
    total = more + less
    tail = sum(math.comb(total, number) for number in range(min(more, less) + 1))
    return min(1.0, float(2 * tail / 2**total))
