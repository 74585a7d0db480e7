"""Bringing returns to one scale before credit is assigned: by group (state), batch or running statistics.

Each rule says what to subtract from an episode's return and what to divide it by; `RewardNormalizer`
carries that over to the rewards of the turns. Advantages are whitened elsewhere (`whitening`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.group import dr_grpo, group_std
from ragen_pl.algorithms.whitening import AllReduce, masked_moments

_EPS = 1e-6
Scale = tuple[Tensor, Tensor]
"""Centre and divisor, each float32 `[trajectories]`."""


def _divisor(std: Tensor, mean: Tensor) -> Tensor:
    """Return what to divide by: 1 where returns agree but for rounding, so that turn rewards keep their size."""
    return torch.where(std > _EPS * (1.0 + mean.abs()), std + _EPS, 1.0)


class Normalizer(Protocol):
    """What a rule offers; `iteration` counts from 0."""

    def __call__(
        self, returns: Tensor, group: Tensor, *, iteration: int, all_reduce: AllReduce | None = None
    ) -> Scale:
        """Return what to subtract from each return and what to divide it by."""
        ...


@dataclass(frozen=True)
class Raw:
    """Leave returns as they are (the first step of RAGEN's ladder, ARPO)."""

    def __call__(
        self, returns: Tensor, group: Tensor, *, iteration: int, all_reduce: AllReduce | None = None
    ) -> Scale:
        """Return 0 and 1."""
        return torch.zeros_like(returns), torch.ones_like(returns)


@dataclass(frozen=True, kw_only=True)
class ByGroup:
    """Centre and scale by the group's own returns (its start state's; GRPO's step of the ladder)."""

    scale_by_std: bool = True

    def __call__(
        self, returns: Tensor, group: Tensor, *, iteration: int, all_reduce: AllReduce | None = None
    ) -> Scale:
        """Return each group's mean and deviation."""
        mean = returns - dr_grpo(returns, group)
        if not self.scale_by_std:
            return mean, torch.ones_like(returns)
        return mean, _divisor(group_std(returns, group), mean)


@dataclass(frozen=True, kw_only=True)
class ByBatch:
    """Centre and scale by all returns of the iteration (BRPO's step of the ladder)."""

    scale_by_std: bool = True

    def __call__(
        self, returns: Tensor, group: Tensor, *, iteration: int, all_reduce: AllReduce | None = None
    ) -> Scale:
        """Return the batch's mean and deviation over all ranks."""
        everywhere = torch.ones_like(returns, dtype=torch.bool)
        mean, variance = masked_moments(returns, everywhere, all_reduce=all_reduce)
        std = _divisor(variance.sqrt(), mean) if self.scale_by_std else torch.ones_like(mean)
        return mean.expand_as(returns), std.expand_as(returns)


@dataclass(kw_only=True)
class Running:
    """Centre and scale by statistics of all iterations, older ones fading by `decay` an iteration."""

    decay: float = 0.99

    def __post_init__(self) -> None:
        """Start with nothing known: weight, sum, sum of squares."""
        if not 0 < self.decay <= 1:
            raise ValueError(f"found decay={self.decay} in Running, expected above 0, at most 1")
        self.sums = [0.0, 0.0, 0.0]

    def __call__(
        self, returns: Tensor, group: Tensor, *, iteration: int, all_reduce: AllReduce | None = None
    ) -> Scale:
        """Take note of these returns, over all ranks, and return mean and deviation."""
        x = returns.double()
        seen = torch.stack([x.new_tensor(float(len(x))), x.sum(), x.square().sum()])
        seen = (all_reduce or (lambda total: total))(seen)
        self.sums = [self.decay * a + b for a, b in zip(self.sums, seen.tolist(), strict=True)]
        weight, total, squares = self.sums
        mean = total / max(weight, 1.0)
        std = max(squares / max(weight, 1.0) - mean**2, 0.0) ** 0.5
        centre = torch.full_like(returns, mean)
        return centre, _divisor(torch.full_like(returns, std), centre)

    def state_dict(self) -> dict[str, list[float]]:
        """Return the sums."""
        return {"sums": list(self.sums)}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Restore them."""
        self.sums = list(state["sums"])


@dataclass(kw_only=True)
class Schedule:
    """Move along a ladder of rules: `stages[i]` from iteration `starts[i]` on.

    Raw, then batch, then group, is what the literature calls progressive reward normalization.
    """

    stages: Sequence[Normalizer] = field(default_factory=lambda: (Raw(), ByBatch(), ByGroup()))
    starts: Sequence[int] = (0, 20, 50)

    def __post_init__(self) -> None:
        """Check that there is one rule at any time."""
        rising = list(self.starts) == sorted(set(self.starts))
        if len(self.stages) != len(self.starts) or not rising or self.starts[0] != 0:
            raise ValueError(
                f"found starts={list(self.starts)} for {len(self.stages)} stages, expected as many rising "
                "numbers, the first 0; set algorithm.normalize.by.starts"
            )

    def __call__(
        self, returns: Tensor, group: Tensor, *, iteration: int, all_reduce: AllReduce | None = None
    ) -> Scale:
        """Ask the stage that the iteration belongs to."""
        stage = sum(start <= iteration for start in self.starts) - 1
        rule = self.stages[stage]
        return rule(returns, group, iteration=iteration, all_reduce=all_reduce)


@dataclass(kw_only=True)
class RewardNormalizer:
    """Normalize the returns of episodes, bound them, and change the turns' rewards accordingly.

    Args:
        by: the rule.
        clip_low: least normalized return, None for none.
        clip_high: largest normalized return; the two need not be alike.
    """

    by: Normalizer = field(default_factory=Raw)
    clip_low: float | None = None
    clip_high: float | None = None

    def __post_init__(self) -> None:
        """Check the bounds and begin at the first iteration."""
        if None not in (self.clip_low, self.clip_high) and self.clip_low >= self.clip_high:  # type: ignore[operator]
            raise ValueError(
                f"algorithm.normalize: found clip_low={self.clip_low} and clip_high={self.clip_high}, "
                "expected the first below the second"
            )
        self.iteration = 0

    def __call__(
        self,
        turn_rewards: Tensor,
        turns: Tensor,
        group: Tensor,
        *,
        all_reduce: AllReduce | None = None,
    ) -> Tensor:
        """Return turn rewards that sum to the normalized returns.

        Each reward is divided as the return is; what is subtracted or clipped off goes to the last turn,
        where the outcome is known.

        Args:
            turn_rewards: `[trajectories, turns]`.
            turns: int64 `[trajectories]`.
            group: int64 `[trajectories]`.
            all_reduce: sums a tensor over the ranks.

        >>> rewards, group = torch.tensor([[1.0, 2.0], [1.0, 0.0]]), torch.tensor([0, 0])
        >>> RewardNormalizer(by=ByGroup(scale_by_std=False))(rewards, torch.tensor([2, 1]), group)
        tensor([[ 1.,  0.],
                [-1.,  0.]])
        """
        iteration, self.iteration = self.iteration, self.iteration + 1
        plain = isinstance(self.by, Raw) and self.clip_low is None and self.clip_high is None
        if plain or not turn_rewards.shape[1]:
            return turn_rewards
        returns = turn_rewards.sum(1)
        centre, scale = self.by(returns, group, iteration=iteration, all_reduce=all_reduce)
        wanted = (returns - centre) / scale
        if self.clip_low is not None or self.clip_high is not None:
            wanted = wanted.clamp(self.clip_low, self.clip_high)
        scaled = turn_rewards / scale[:, None]
        last = (turns - 1).clamp(min=0)[:, None]
        return scaled.scatter_add(1, last, (wanted - returns / scale)[:, None])

    def state_dict(self) -> dict[str, object]:
        """Return the iteration and what the rules remember."""
        return {
            "iteration": self.iteration,
            "running": [rule.state_dict() for rule in self._running()],
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`."""
        self.iteration = int(state["iteration"])  # type: ignore[call-overload]
        for rule, sums in zip(self._running(), state["running"], strict=True):  # type: ignore[call-overload]
            rule.load_state_dict(sums)

    def _running(self) -> list[Running]:
        rules = self.by.stages if isinstance(self.by, Schedule) else [self.by]
        return [rule for rule in rules if isinstance(rule, Running)]
