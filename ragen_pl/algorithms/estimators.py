"""Advantage estimators as small callables that a config names by class path.

Each turns a `Credit` into `Advantages`; the formulas are the pure functions of `advantages`.
Whitening is a choice of its own (`whitening.whiten` over the loss mask), except in REINFORCE++,
which is defined by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.bilevel import bilevel_gae
from ragen_pl.algorithms.advantages.gae import masked_gae
from ragen_pl.algorithms.advantages.gigpo import gigpo
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
    needs_states: ClassVar[bool]

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        ...


@dataclass(frozen=True, kw_only=True)
class MaskedGAE:
    """Token-level GAE over M_adv (StarPO with a critic)."""

    needs_values: ClassVar[bool] = True
    needs_states: ClassVar[bool] = False
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
    needs_states: ClassVar[bool] = False
    gamma_turn: float = 0.95
    gamma_token: float = 1.0
    lam_turn: float = 1.0
    lam_token: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_unit(self, "gamma_turn", "gamma_token", "lam_turn", "lam_token")

    def discounts(self, credit: Credit) -> float | Tensor:
        """Return gamma_turn, or one for each turn at its end, `[trajectories, tokens]`."""
        return self.gamma_turn

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        pair = bilevel_gae(
            credit.rewards,
            credit.need_values(self),
            torch.where(credit.advantage_mask, credit.turn, -1),
            gamma_turn=self.discounts(credit),
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
    needs_states: ClassVar[bool] = False
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
    needs_states: ClassVar[bool] = False
    scale_by_std: bool = True

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        relative = grpo if self.scale_by_std else dr_grpo
        return broadcast(relative(credit.returns, credit.group), credit)


@dataclass(frozen=True, kw_only=True)
class GroupInGroup:
    """The episode against its group, and each turn against turns from the same state (GiGPO)."""

    needs_values: ClassVar[bool] = False
    needs_states: ClassVar[bool] = True
    gamma: float = 0.95  # per turn, of the step returns
    step_weight: float = 1.0
    scale_by_std: bool = True

    def __post_init__(self) -> None:
        """Check the range."""
        check_unit(self, "gamma")

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        if credit.state is None:
            raise ValueError(
                "found no anchor states, expected those of the environment's state_key(); GroupInGroup compares "
                "turns from the same state: choose an environment that has it, or algorithm=grpo"
            )
        state, turn = credit.state, credit.turn.clamp(min=0)
        rewards = torch.zeros(state.shape, device=state.device)
        inside = torch.where(credit.turn >= 0, credit.rewards.float(), 0.0)
        of_turn = gigpo(
            credit.returns, credit.group,
            rewards.scatter_add(1, turn, inside) if state.shape[1] else rewards,
            state, gamma=self.gamma, step_weight=self.step_weight, scale_by_std=self.scale_by_std,
        )  # fmt: skip
        tokens = of_turn.gather(1, turn) if state.shape[1] else torch.zeros_like(inside)
        result = broadcast(credit.returns, credit)
        result.advantages = torch.where(credit.loss_mask, tokens, 0.0)
        return result


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut:
    """Returns against the mean of the group's other members (RLOO)."""

    needs_values: ClassVar[bool] = False
    needs_states: ClassVar[bool] = False

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        return broadcast(rloo(credit.returns, credit.group), credit)


@dataclass(frozen=True, kw_only=True)
class BatchRelative:
    """Returns standardised over the whole batch, all ranks included (BRPO)."""

    needs_values: ClassVar[bool] = False
    needs_states: ClassVar[bool] = False

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        return broadcast(batch(credit.returns, all_reduce=all_reduce), credit)


@dataclass(frozen=True, kw_only=True)
class RawReturn:
    """Returns as they are (ARPO)."""

    needs_values: ClassVar[bool] = False
    needs_states: ClassVar[bool] = False

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        return broadcast(raw(credit.returns), credit)


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus:
    """Discounted returns-to-go, whitened over the whole batch (REINFORCE++)."""

    needs_values: ClassVar[bool] = False
    needs_states: ClassVar[bool] = False
    gamma: float = 1.0

    def __post_init__(self) -> None:
        """Check the range."""
        check_unit(self, "gamma")

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Estimate the advantages of a batch of trajectories."""
        mask = credit.advantage_mask
        pair = reinforce_plus_plus(credit.rewards, mask, gamma=self.gamma, all_reduce=all_reduce)
        return finish(*pair, credit)
