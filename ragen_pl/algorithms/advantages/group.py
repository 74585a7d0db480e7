"""Baselines from the other trajectories of a group: GRPO, Dr. GRPO, RLOO, MaxRL.

A group is the trajectories that started from the same environment seed. Its members are counted as
trajectories, never as turns or rows. A group must be complete. Where its returns are equal but for rounding
(`algorithms.equality`), all advantages and the deviation are 0. Returns in float64 give results in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragen_pl.algorithms.credit import (
    AdvantageInputs,
    Advantages,
    Estimator,
    StandardizationScope,
    broadcast,
)
from ragen_pl.algorithms.equality import agree_within
from ragen_pl.algorithms.whitening import AllReduce


def _same_group(group: Tensor) -> Tensor:
    return (group[:, None] == group[None, :]).float()


def _centered(returns: Tensor, group: Tensor, same: Tensor) -> Tensor:
    if returns.dtype != torch.float64:
        returns = returns.float()
    # the mean of the pairwise differences is the distance to the mean
    differences = returns[:, None] - returns[None, :]
    distances = (same * differences).sum(1) / same.sum(1)
    return torch.where(agree_within(returns, group), 0.0, distances)


def group_std(returns: Tensor, group: Tensor) -> Tensor:
    """Measure the spread of returns within each trajectory's group.

    Args:
        returns: `[trajectories]`.
        group: Int `[trajectories]`.

    Returns:
        float32 `[trajectories]`: unbiased standard deviation, 0 for a group of one.

    >>> group_std(torch.tensor([0.0, 2.0, 5.0]), torch.tensor([0, 0, 1]))
    tensor([1.4142, 1.4142, 0.0000])
    """
    same = _same_group(group)
    squares = _centered(returns, group, same).square()
    return ((same * squares[None, :]).sum(1) / (same.sum(1) - 1).clamp(min=1)).sqrt()


def grpo(returns: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Standardize returns within the group (GRPO; Shao et al., 2024).

    `(R - mean) / (std + eps)` with the unbiased std; a group of one gets 0.

    Args:
        returns: `[trajectories]`.
        group: Int `[trajectories]`.
        eps: Added to the deviation.

    Returns:
        float32 `[trajectories]`.

    >>> grpo(torch.tensor([0.0, 2.0, 5.0]), torch.tensor([0, 0, 1]))
    tensor([-0.7071,  0.7071,  0.0000])
    """
    return dr_grpo(returns, group) / (group_std(returns, group) + eps)


def dr_grpo(returns: Tensor, group: Tensor) -> Tensor:
    """Center returns within the group, without the deviation (Dr. GRPO; Liu et al., 2025).

    Args:
        returns: `[trajectories]`.
        group: Int `[trajectories]`.

    Returns:
        float32 `[trajectories]`.

    >>> dr_grpo(torch.tensor([0.0, 2.0, 5.0]), torch.tensor([0, 0, 1]))
    tensor([-1.,  1.,  0.])
    """
    return _centered(returns, group, _same_group(group))


def rloo(returns: Tensor, group: Tensor) -> Tensor:
    """Subtract the mean return of the group's other members (RLOO; Ahmadian et al., 2024).

    Args:
        returns: `[trajectories]`.
        group: Int `[trajectories]`.

    Returns:
        float32 `[trajectories]`; 0 for a group of one, which has no other member.

    >>> rloo(torch.tensor([0.0, 2.0, 5.0]), torch.tensor([0, 0, 1]))
    tensor([-2.,  2.,  0.])
    """
    same = _same_group(group)
    count = same.sum(1)
    return _centered(returns, group, same) * count / (count - 1).clamp(min=1)


def maxrl(solved: Tensor, group: Tensor) -> Tensor:
    """Divide success less the group's mean by that mean (MaxRL; Tajwar, Zeng et al., 2026, arXiv 2602.02710, alg. 1).

    `(s - m) / m` with m the fraction of the group that solved the task, 0 where none did. For N members and a success
    rate p the expected gradient is `(1 - (1 - p)^(N - 1)) / p` times that of p: the gradient of log p, which a task
    that is rarely solved has a larger part in, up to the order N - 1 of its series in 1 - p. The paper has the order N
    for successes that are not centered; the group's mean takes one. Success is 0 or 1: for other rewards the mean is no
    probability, and below 0 it turns the sign.

    Args:
        solved: Bool `[trajectories]`.
        group: Int `[trajectories]`.

    Returns:
        float32 `[trajectories]`; 0 in a group of one.

    >>> maxrl(torch.tensor([True, False, False, False, False]), torch.tensor([0, 0, 0, 0, 1]))
    tensor([ 3., -1., -1., -1.,  0.])
    """
    same = _same_group(group)
    successes = (same * solved.float()[None, :]).sum(1)
    relative = same.sum(1) * solved.float() / successes.clamp(min=1) - 1
    return torch.where(successes > 0, relative, 0.0)


@dataclass(frozen=True, kw_only=True)
class GroupRelative(Estimator):
    """Returns centered in their group, divided by its deviation (GRPO) or not (Dr. GRPO)."""

    needs_trust = ()

    needs_groups: ClassVar[bool] = True
    scale_by_std: bool = True

    @property
    def standardizes(self) -> StandardizationScope | None:
        """The group, where its deviation divides."""
        return "group" if self.scale_by_std else None

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `grpo` or `dr_grpo` to the returns."""
        relative = grpo if self.scale_by_std else dr_grpo
        return broadcast(relative(inputs.returns, inputs.group), inputs)


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(Estimator):
    """Returns against the mean of the group's other members (RLOO)."""

    needs_trust = ()

    needs_groups: ClassVar[bool] = True

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `rloo` to the returns."""
        return broadcast(rloo(inputs.returns, inputs.group), inputs)


@dataclass(frozen=True, kw_only=True)
class SuccessRelative(Estimator):
    """Success relative to that of the group, divided by the group's mean (MaxRL). Rewards are not read."""

    needs_trust = ()

    needs_groups: ClassVar[bool] = True
    needs_success: ClassVar[bool] = True
    reads_returns: ClassVar[bool] = False

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `maxrl` to the successes.

        Raises:
            ValueError: The environment says of no episode whether the task was solved.
        """
        solved = inputs.need_success(self, all_reduce=all_reduce)
        return broadcast(maxrl(solved, inputs.group), inputs)
