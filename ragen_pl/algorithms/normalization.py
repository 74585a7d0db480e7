"""Normalization of returns before credit is assigned: by group (state), by batch, or by running statistics.

Each rule returns what to subtract from an episode's return and what to divide it by. `RewardNormalizer` divides the
rewards of the turns, and leaves what is subtracted to credit assignment, which takes it from every return-to-go: in the
reward of one turn, a discount would pay for longer or shorter episodes. Advantages are whitened separately
(`whitening`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.group import dr_grpo, group_std
from ragen_pl.algorithms.credit import StandardizationScope
from ragen_pl.algorithms.equality import EQUAL, sums_of
from ragen_pl.algorithms.whitening import AllReduce, masked_moments
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import CountOrZero, PositiveFraction
from ragen_pl.base.run_facts import RunFacts

_EPS = 1e-6
_KEY = "algorithm.normalize.by"
Scale = tuple[Tensor, Tensor]
"""Center and divisor, each float32 `[trajectories]`."""


def _divisor(std: Tensor) -> Tensor:
    """Return std, or 1 where it is 0, which keeps the size of turn rewards."""
    return torch.where(std > 0, std + _EPS, 1.0)


class Normalizer(Protocol):
    """Normalization rule.

    Attributes:
        scope: Trajectories that share a shift and a scale, None if the rule changes nothing.
    """

    scope: ClassVar[StandardizationScope | None] = "batch"

    @property
    def needs_groups(self) -> bool:
        """Whether the rule compares the returns inside a group."""
        return self.scope == "group"

    def __call__(
        self, returns: Tensor, group: Tensor, *, iteration: int, all_reduce: AllReduce | None = None
    ) -> Scale:
        """Return the shift and the scale of each return.

        Args:
            returns: `[trajectories]`.
            group: int64 `[trajectories]`.
            iteration: Number of the iteration, from 0.
            all_reduce: Sums a tensor over the ranks; None on one rank.
        """
        ...

    def state_dict(self) -> dict[str, object]:
        """Return the statistics that a checkpoint keeps."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`."""
        return None


@dataclass(frozen=True)
class Raw(Normalizer):
    """Leave returns as they are (the first step of RAGEN's ladder, ARPO)."""

    needs_trust = ()

    scope: ClassVar[StandardizationScope | None] = None

    def __call__(
        self, returns: Tensor, group: Tensor, *, iteration: int, all_reduce: AllReduce | None = None
    ) -> Scale:
        """Return 0 and 1."""
        return torch.zeros_like(returns), torch.ones_like(returns)


@dataclass(frozen=True, kw_only=True)
class ByGroup(Normalizer):
    """Center and scale by the group's own returns (its start state's; GRPO's step of the ladder)."""

    needs_trust = ()

    scope: ClassVar[StandardizationScope | None] = "group"

    scale_by_std: bool = True

    def __call__(
        self, returns: Tensor, group: Tensor, *, iteration: int, all_reduce: AllReduce | None = None
    ) -> Scale:
        """Return each group's mean and deviation."""
        mean = returns - dr_grpo(returns, group)
        if not self.scale_by_std:
            return mean, torch.ones_like(returns)
        return mean, _divisor(group_std(returns, group))


@dataclass(frozen=True, kw_only=True)
class ByBatch(Normalizer):
    """Center and scale by all returns of the iteration (BRPO's step of the ladder)."""

    needs_trust = ()

    scale_by_std: bool = True

    def __call__(
        self, returns: Tensor, group: Tensor, *, iteration: int, all_reduce: AllReduce | None = None
    ) -> Scale:
        """Return the batch's mean and deviation over all ranks."""
        everywhere = torch.ones_like(returns, dtype=torch.bool)
        mean, variance = masked_moments(returns, everywhere, all_reduce=all_reduce)
        std = _divisor(variance.sqrt()) if self.scale_by_std else torch.ones_like(mean)
        return mean.expand_as(returns), std.expand_as(returns)


@checked
@dataclass(kw_only=True)
class Running(Normalizer):
    """Center and scale by statistics of all iterations; older ones are multiplied by `decay` an iteration."""

    needs_trust = ()

    decay: PositiveFraction = 0.99

    def __post_init__(self) -> None:
        # weight, sum, sum of squares
        self.sums = [0.0, 0.0, 0.0]

    def __call__(
        self, returns: Tensor, group: Tensor, *, iteration: int, all_reduce: AllReduce | None = None
    ) -> Scale:
        """Add these returns of all ranks to the statistics and return mean and deviation."""
        x = returns.double()
        new = torch.stack([x.new_tensor(float(len(x))), x.sum(), x.square().sum()])
        new = new if all_reduce is None else all_reduce(new)
        self.sums = [self.decay * a + b for a, b in zip(self.sums, new.tolist(), strict=True)]
        weight, total, squares = self.sums
        mean = total / max(weight, 1.0)
        variance = max(squares / max(weight, 1.0) - mean**2, 0.0)
        std = variance**0.5 if variance > (EQUAL * mean) ** 2 else 0.0
        return torch.full_like(returns, mean), _divisor(torch.full_like(returns, std))

    def state_dict(self) -> dict[str, object]:
        """Return the sums."""
        return {"sums": list(self.sums)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the sums."""
        self.sums = list(state["sums"])  # type: ignore[call-overload]


@checked
@dataclass(kw_only=True)
class Schedule(Normalizer):
    """Sequence of rules: `stages[i]` applies from iteration `starts[i]` on.

    Raw, then batch, then group, is progressive reward normalization.
    """

    stages: Sequence[Normalizer] = field(default_factory=lambda: (Raw(), ByBatch(), ByGroup()))
    starts: Sequence[CountOrZero] = (0, 20, 50)

    def __post_init__(self) -> None:
        rising = list(self.starts) == sorted(set(self.starts))
        if len(self.stages) != len(self.starts) or not rising or self.starts[0] != 0:
            raise ValueError(
                f"found starts={list(self.starts)} for {len(self.stages)} stages, expected as many rising "
                "numbers, the first 0; set algorithm.normalize.by.starts"
            )

    @property
    def needs_groups(self) -> bool:
        """Whether a stage compares the returns inside a group."""
        return any(stage.needs_groups for stage in self.stages)

    def __call__(
        self, returns: Tensor, group: Tensor, *, iteration: int, all_reduce: AllReduce | None = None
    ) -> Scale:
        """Apply the stage of this iteration."""
        stage = sum(start <= iteration for start in self.starts) - 1
        rule = self.stages[stage]
        return rule(returns, group, iteration=iteration, all_reduce=all_reduce)

    def state_dict(self) -> dict[str, object]:
        """Return the statistics of all stages."""
        return {"stages": [stage.state_dict() for stage in self.stages]}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore the statistics of all stages, which may be others than those of the checkpoint."""
        from ragen_pl.base.restoring import restore

        for stage, statistics in zip(self.stages, state["stages"], strict=False):  # type: ignore[call-overload]
            restore(stage, statistics, key=_KEY)


@dataclass(frozen=True, slots=True)
class NormalizedRewards:
    """Normalized returns, as rewards of turns less a constant for each episode.

    Attributes:
        turn_rewards: `[trajectories, turns]`; they add up to the normalized return plus `center`.
        center: `[trajectories]`, to be subtracted from every return-to-go of an episode; None for nothing.
    """

    turn_rewards: Tensor
    center: Tensor | None


@checked
@dataclass(kw_only=True)
class RewardNormalizer:
    """Normalize and bound the returns of episodes, and change the turns' rewards accordingly.

    Args:
        by: The rule.
        clip_low: Lowest normalized return, None for no bound.
        clip_high: Highest normalized return, None for no bound; need not mirror `clip_low`.
    """

    needs_trust = ()

    by: Normalizer = field(default_factory=Raw)
    clip_low: float | None = None
    clip_high: float | None = None

    def __post_init__(self) -> None:
        low, high = self.clip_low, self.clip_high
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"algorithm.normalize: found clip_low={low} and clip_high={high}, "
                "expected the first below the second"
            )
        self.iteration = 0

    @property
    def clips(self) -> bool:
        """Whether normalized returns have a bound."""
        return self.clip_low is not None or self.clip_high is not None

    @property
    def changes_returns(self) -> bool:
        """Whether returns are shifted, scaled or bounded."""
        return self.by.scope is not None or self.clips

    @property
    def needs_groups(self) -> bool:
        """Whether the rule compares the returns inside a group."""
        return self.by.needs_groups

    def check_run(self, facts: RunFacts) -> None:
        """Check that groups can be compared, and that neither whitening nor the estimator undoes the normalization.

        Standardization undoes a shift and a scale that all returns of its mean share.

        Raises:
            ValueError: They can't, or it does.
        """
        if self.needs_groups:
            facts.require_groups(self, key="algorithm.normalize")
        if self.by.scope is not None and facts.whitens and facts.critic == "none":
            facts.refuse_whitening(type(self.by).__name__, scope=self.by.scope)
        scopes = self.by.scope, facts.standardizes
        if self.clips or facts.rewards_penalized or None in scopes or scopes == ("group", "batch"):
            return
        raise ValueError(
            f"algorithm.normalize.by={type(self.by).__name__}: {facts.estimator} standardizes returns itself, which "
            "undoes it; set Raw, or another estimator"
        )

    def __call__(
        self,
        turn_rewards: Tensor,
        turns: Tensor,
        group: Tensor,
        *,
        all_reduce: AllReduce | None = None,
    ) -> NormalizedRewards:
        """Return the turns' rewards and the center of their returns.

        Each reward is divided by the divisor of the return. What is clipped off goes to the last turn, where the
        outcome is known.

        Args:
            turn_rewards: `[trajectories, turns]`.
            turns: int64 `[trajectories]`, number of turns.
            group: int64 `[trajectories]`.
            all_reduce: Sums a tensor over the ranks; None on one rank.

        >>> rewards, group = torch.tensor([[1.0, 2.0], [1.0, 0.0]]), torch.tensor([0, 0])
        >>> RewardNormalizer(by=ByGroup(scale_by_std=False))(rewards, torch.tensor([2, 1]), group)
        NormalizedRewards(turn_rewards=tensor([[1., 2.],
                [1., 0.]]), center=tensor([2., 2.]))
        """
        iteration, self.iteration = self.iteration, self.iteration + 1
        if not self.changes_returns or not turn_rewards.shape[1]:
            return NormalizedRewards(turn_rewards, None)
        returns = sums_of(turn_rewards)
        center, scale = self.by(returns, group, iteration=iteration, all_reduce=all_reduce)
        scaled = turn_rewards / scale[:, None]
        if self.clips:
            normalized = (returns - center) / scale
            clipped_off = normalized.clamp(self.clip_low, self.clip_high) - normalized
            last = (turns - 1).clamp(min=0)[:, None]
            scaled = scaled.scatter_add(1, last, clipped_off[:, None])
        return NormalizedRewards(scaled, None if self.by.scope is None else center / scale)

    def state_dict(self) -> dict[str, object]:
        """Return the iteration and the statistics of the rule."""
        return {"iteration": self.iteration, "by": self.by.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`."""
        from ragen_pl.base.restoring import restore

        self.iteration = int(state["iteration"])  # type: ignore[call-overload]
        restore(self.by, state["by"], key=_KEY)  # type: ignore[arg-type]
