"""Advantage estimators as small callables that a config names by class path.

Each turns a `Credit` into `Advantages`; the formulas are the pure functions of `advantages`.
Whitening is a choice of its own (`whitening.whiten` over the loss mask), except in REINFORCE++,
which is defined by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from ragen_pl.algorithms.advantages.bilevel import bilevel_gae
from ragen_pl.algorithms.advantages.gae import masked_gae
from ragen_pl.algorithms.advantages.group import dr_grpo, grpo, rloo
from ragen_pl.algorithms.advantages.reinforce import batch, raw, reinforce_plus_plus
from ragen_pl.algorithms.advantages.turn import turn_gae
from ragen_pl.algorithms.credit import Advantages, Credit, broadcast, check_unit, finish
from ragen_pl.algorithms.whitening import AllReduce


class Estimator(Protocol):
    """What an advantage estimator offers.

    `all_reduce` sums a tensor over the ranks, for estimators with batch statistics.
    """

    needs_values: ClassVar[bool]

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        ...


@dataclass(frozen=True, kw_only=True)
class MaskedGAE:
    """Token-level GAE over M_adv (StarPO with a critic)."""

    needs_values: ClassVar[bool] = True
    gamma: float = 1.0
    lam: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_unit(self, "gamma", "lam")

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        mask, values = credit.advantage_mask, credit.need_values(self)
        parameters = {"gamma": self.gamma, "lam": self.lam}
        pair = masked_gae(credit.rewards, values, mask, bootstrap=credit.bootstrap, **parameters)
        return finish(*pair, credit)


@dataclass(frozen=True, kw_only=True)
class BilevelGAE:
    """GAE across turns, then inside each turn (VAGEN; TRICO).

    `gamma_turn` defaults below 1: with all four at 1 this is `MaskedGAE`.
    """

    needs_values: ClassVar[bool] = True
    gamma_turn: float = 0.95
    gamma_token: float = 1.0
    lam_turn: float = 1.0
    lam_token: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_unit(self, "gamma_turn", "gamma_token", "lam_turn", "lam_token")

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        pair = bilevel_gae(
            credit.rewards,
            credit.need_values(self),
            torch.where(credit.advantage_mask, credit.turn, -1),
            gamma_turn=self.gamma_turn,
            lam_turn=self.lam_turn,
            gamma_token=self.gamma_token,
            lam_token=self.lam_token,
            bootstrap=credit.bootstrap,
        )
        return finish(*pair, credit)


@dataclass(frozen=True, kw_only=True)
class TurnGAE:
    """GAE with one step per turn, shared by the turn's tokens (turn-level PPO)."""

    needs_values: ClassVar[bool] = True
    gamma: float = 1.0
    lam: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_unit(self, "gamma", "lam")

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        turn, values = torch.where(credit.advantage_mask, credit.turn, -1), credit.need_values(self)
        parameters = {"gamma": self.gamma, "lam": self.lam}
        pair = turn_gae(credit.rewards, values, turn, bootstrap=credit.bootstrap, **parameters)
        return finish(*pair, credit)


@dataclass(frozen=True, kw_only=True)
class GroupRelative:
    """Returns centred in their group, divided by its deviation (GRPO) or not (Dr. GRPO)."""

    needs_values: ClassVar[bool] = False
    scale_by_std: bool = True

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        relative = grpo if self.scale_by_std else dr_grpo
        return broadcast(relative(credit.returns, credit.group), credit)


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut:
    """Returns against the mean of the group's other members (RLOO)."""

    needs_values: ClassVar[bool] = False

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        return broadcast(rloo(credit.returns, credit.group), credit)


@dataclass(frozen=True, kw_only=True)
class BatchRelative:
    """Returns standardised over the whole batch, all ranks included (BRPO)."""

    needs_values: ClassVar[bool] = False

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        return broadcast(batch(credit.returns, all_reduce=all_reduce), credit)


@dataclass(frozen=True, kw_only=True)
class RawReturn:
    """Returns as they are (ARPO)."""

    needs_values: ClassVar[bool] = False

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        return broadcast(raw(credit.returns), credit)


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus:
    """Discounted returns-to-go, whitened over the whole batch (REINFORCE++)."""

    needs_values: ClassVar[bool] = False
    gamma: float = 1.0

    def __post_init__(self) -> None:
        """Check the range."""
        check_unit(self, "gamma")

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        mask = credit.advantage_mask
        pair = reinforce_plus_plus(credit.rewards, mask, gamma=self.gamma, all_reduce=all_reduce)
        return finish(*pair, credit)
