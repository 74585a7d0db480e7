"""Several environments in one run: which one a group plays, and what each counts in the loss.

A mixture must not depend on how long the responses of an environment are, or how large its rewards: advantages are
whitened inside each environment, and tokens are weighted so that an environment's part of the loss is its share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ragen_pl.algorithms.whitening import AllReduce

# its former place
from ragen_pl.algorithms.whitening import whiten_by_environment as whiten_by_environment


class Place(NamedTuple):
    """Environment of a group of a run.

    Attributes:
        environment: Number of its environment.
        number: Number of earlier groups of the run in this environment.
    """

    environment: int
    number: int


class MixtureSchedule:
    """Environment of each group of a run, by shares that are exact at all times and without a random draw.

    Group m of the run, from 0, plays the environment with the largest `share_e (m + 1) - count_e`, where the shares add
    up to 1 and `count_e` groups before it have played the environment; the first of equal ones. A count is never a
    whole group above its share, and below it by fewer groups than there are other environments. It depends on m alone,
    so it is the same on any number of ranks and after a resume.

    Args:
        share: Share of each environment, 0 for one that is never played; they need not add up to 1.

    Raises:
        ValueError: A share is negative or not finite, or all are 0.

    >>> schedule = MixtureSchedule([1.0, 3.0])
    >>> [schedule.place(group) for group in range(3)]
    [Place(environment=1, number=0), Place(environment=0, number=0), Place(environment=1, number=1)]
    """

    def __init__(self, share: Sequence[float]) -> None:
        if any(not math.isfinite(one) or one < 0 for one in share) or not sum(share) > 0:
            raise ValueError(
                f"share={[*share]}: expected numbers of 0 or more, and one above 0 at least"
            )
        self.share = [one / sum(share) for one in share]
        self._counts = [0] * len(share)
        self._places: list[Place] = []

    def place(self, group: int) -> Place:
        """Return the environment of a group of the run.

        Args:
            group: Number of the group in the run, from 0.
        """
        while len(self._places) <= group:
            slot = len(self._places) + 1
            # rounded, so that equal lags are equal on every machine
            lags = [
                round(share * slot - count, 12)
                for share, count in zip(self.share, self._counts, strict=True)
            ]
            environment = lags.index(max(lags))
            self._places.append(Place(environment, self._counts[environment]))
            self._counts[environment] += 1
        return self._places[group]


def mixture_schedule(share: Sequence[float], *, groups: int, iterations: int) -> list[list[int]]:
    """Return the environment of each group of each iteration; see `MixtureSchedule`.

    Args:
        share: Share of each environment.
        groups: Number of groups of an iteration.
        iterations: Number of iterations.

    >>> mixture_schedule([0.5, 0.5], groups=3, iterations=2)
    [[0, 1, 0], [1, 0, 1]]
    """
    schedule = MixtureSchedule(share)
    return [
        [schedule.place(iteration * groups + group).environment for group in range(groups)]
        for iteration in range(iterations)
    ]


def environment_weights(
    weight: Tensor,
    environment: Tensor,
    share: Sequence[float],
    *,
    all_reduce: AllReduce | None = None,
) -> Tensor:
    """Return weights of tokens by which each environment has its share of their sum, over all ranks.

    A token of environment e is multiplied by `share_e n / n_e`, where n_e is the weight of the environment's tokens and
    n that of all. So one with long responses has no larger part of the loss. The shares of those without a token go to
    the others.

    Args:
        weight: `[trajectories, tokens]`, weight of a token in the loss, or a mask.
        environment: int64 `[trajectories]`.
        share: Share of each environment.
        all_reduce: Sums a tensor over the ranks; None on one rank.

    Returns:
        float32 `[trajectories, tokens]`, with the sum of `weight`. Where no environment with a token has a share, they
        are `weight`.

    >>> weight, environment = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]), torch.tensor([0, 1])
    >>> environment_weights(weight, environment, [1.0, 1.0])
    tensor([[0.6667, 0.6667, 0.6667],
            [2.0000, 0.0000, 0.0000]])
    """
    weight = weight.float()
    tokens = torch.zeros(len(share), dtype=torch.float64, device=weight.device)
    # row sums in float64: the factors are the same however rows are divided over ranks
    tokens = tokens.index_add(0, environment, weight.double().sum(1))
    tokens = tokens if all_reduce is None else all_reduce(tokens)
    present = torch.where(tokens > 0, tokens.new_tensor([*share]), 0.0)
    if not bool(present.sum() > 0):
        return weight
    factor = present / present.sum() * tokens.sum() / torch.where(tokens > 0, tokens, 1.0)
    return weight * factor.float()[environment][:, None]
