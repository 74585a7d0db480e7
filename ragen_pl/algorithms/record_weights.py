"""Weights of recorded episodes in supervised learning: rejection sampling, best of n, advantage-weighted regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ragen_pl.algorithms.equality import EQUAL, agree

Rule: TypeAlias = Literal["all", "success", "threshold", "best", "exponential"]


def record_weights(
    returns: Tensor,
    success: Tensor,
    group: Tensor,
    *,
    rule: Rule,
    threshold: float | None = None,
    best: int = 1,
    temperature: float = 1.0,
    cap: float = 20.0,
) -> Tensor:
    """Return the weight ω of each recorded episode, float64 `[episodes]`, for the loss Σ ω w (-log p) / Σ w.

    - `all`: 1.
    - `success`: 1 for solved episodes, otherwise 0 (rejection sampling; RAFT, Dong et al., 2023; ReST, Gulcehre et al.,
      2023). On fresh samples of the policy itself its gradient is that of REINFORCE with rewards 0 and 1 and no
      baseline, divided by the success rate.
    - `threshold`: 1 for returns R ≥ threshold.
    - `best`: 1 for the n highest returns of a group with R ≥ threshold. Among equal ones the first count.
    - `exponential`: min(exp((R - mean R) / β), cap), scaled to mean 1 (advantage-weighted regression, Peng et al.,
      2019, eq. 10, with the mean return as the baseline).

    Returns of a group that are equal but for rounding are equal, and one that is below the threshold by rounding alone
    passes it; see `equality`.

    Args:
        returns: `[episodes]`.
        success: Bool `[episodes]`, whether the task was solved.
        group: int64 `[episodes]`, equal for episodes from the same initial state.
        rule: Which weights.
        threshold: Lowest return of `threshold` and `best`; None for no bound.
        best: N of `best`.
        temperature: β of `exponential`.
        cap: Largest weight of `exponential` before scaling.

    >>> returns, group = torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0, 0, 1])
    >>> record_weights(returns, returns > 0, group, rule="best")
    tensor([0., 1., 1.], dtype=torch.float64)
    """
    returns = returns.double()
    ones = torch.ones_like(returns)
    if rule == "all" or not len(returns):
        return ones
    if rule == "success":
        return ones * success
    if rule == "exponential":
        weights = ((returns - returns.mean()) / temperature).exp().clamp(max=cap)
        return weights / weights.mean()
    bound = -torch.inf if threshold is None else threshold
    slack = EQUAL * returns.abs().clamp(min=0.0 if threshold is None else abs(threshold))
    passes = returns >= bound - slack
    if rule == "threshold":
        return ones * passes
    return ones * (passes & (_place_in_group(returns, group) < best))


def _place_in_group(returns: Tensor, group: Tensor) -> Tensor:
    """Return how many episodes of its group come before each one, by falling return and then by position."""
    order = torch.argsort(returns, descending=True, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    # equal returns of a group are one set, whose episodes are in the order of their positions
    high, low = returns[order[:-1]], returns[order[1:]]
    differs = ~agree(high, low) | (group[order[:-1]] != group[order[1:]])
    sets = torch.zeros_like(order)
    sets[order[1:]] = differs.cumsum(0)
    order = torch.argsort(sets, stable=True)
    sizes = torch.unique_consecutive(group[order], return_counts=True)[1]
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order)) - starts
    return place


def per_group(weights: Tensor, group: Tensor) -> Tensor:
    """Return weights divided by the number of the group's episodes with a weight, so that every group counts alike."""
    numbers = torch.unique(group, return_inverse=True)[1]
    kept = torch.bincount(numbers, weights=(weights > 0).double())
    return weights / kept[numbers].clamp(min=1.0)


def numbered(keys: Sequence[object]) -> Tensor:
    """Return the number of each key's first occurrence, int64 `[keys]`."""
    numbers: dict[object, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)
