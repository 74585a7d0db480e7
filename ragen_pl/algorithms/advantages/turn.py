"""Turn-level advantages: a turn is one step, its tokens share the estimate (turn-level PPO)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.gae import masked_gae
from ragen_pl.algorithms.credit import AdvantageInputs, Advantages, Estimator, finish
from ragen_pl.algorithms.scan import index_from
from ragen_pl.algorithms.turns import (
    at_turn_end,
    nearest_in_turn,
    sum_at_turn_end,
    turn_ends,
    turn_starts,
)
from ragen_pl.algorithms.whitening import AllReduce
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Fraction


def turn_gae(
    rewards: Tensor,
    values: Tensor,
    turn: Tensor,
    *,
    gamma: float | Tensor,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate one advantage per turn and give it to all the turn's tokens.

    The step of the decision process is the turn: its value is read before its first token, its
    reward is the sum of its tokens' rewards, and generalized advantage estimation runs over turns.

    Args:
        rewards: `[trajectories, tokens]`.
        values: `[trajectories, tokens]`; only those at the turns' first tokens are read.
        turn: int64 `[trajectories, tokens]`, not decreasing along a row; -1 off the mask.
        gamma: Discount per turn; `[trajectories, tokens]` where it varies, read at the turns' first tokens.
        lam: Decay of the trace per turn, likewise.
        bootstrap: `[trajectories]`, the value after the last turn; 0 where the task ended.

    Returns:
        Advantages and returns, each float32 `[trajectories, tokens]`, constant over a turn, 0 off
        the mask.

    >>> rewards, values = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.5, 9.0, 0.0]])
    >>> turn_gae(rewards, values, torch.tensor([[0, 0, 1]]), gamma=0.5, lam=1.0)[0]
    tensor([[1.5000, 1.5000, 2.0000]])
    """
    starts, ends, mask = turn_starts(turn), turn_ends(turn), turn >= 0
    totals = sum_at_turn_end(rewards.float(), turn=turn)
    # From each first token, the first end that follows is that of its own turn.
    at_start = totals.gather(1, index_from(ends).clamp(max=turn.shape[1] - 1))
    steps = masked_gae(at_start, values, starts, gamma=gamma, lam=lam, bootstrap=bootstrap)
    source = nearest_in_turn(starts, turn=turn).clamp(min=0)
    advantages, returns = (torch.where(mask, step.gather(1, source), 0.0) for step in steps)
    return advantages, returns


class ValueAt(StrEnum):
    """Token of a turn before which the value of the turn is read."""

    FIRST_TOKEN = "first_token"
    LAST_TOKEN = "last_token"


@checked
@dataclass(frozen=True, kw_only=True)
class TurnGAE(Estimator):
    """GAE with one step per turn, shared by the turn's tokens (turn-level PPO).

    The value of a turn is read before the first token that a critic learns at, so all tokens of the turn share an
    unbiased estimate. `value_at=last_token` is the form of HyGAE (arXiv 2607.23605), of VAGEN's first turn-level PPO
    and of AgileRL: the value before the turn's last token already knows the other tokens of the turn, so these get
    none of the true gradient.

    A turn that does not advance has `gamma = lam = 1`.

    Attributes:
        gamma: Discount per turn.
        lam: Lambda of GAE across turns.
        value_at: Token of a turn before which its value is read.
    """

    needs_trust = ()

    needs_values: ClassVar[bool] = True
    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    value_at: ValueAt = ValueAt.FIRST_TOKEN

    @property
    def turn_discount(self) -> float | None:
        """The discount per turn."""
        return self.gamma

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `turn_gae` to the tokens of M_adv, with the values of their turns."""
        turn, values = torch.where(inputs.advantage_mask, inputs.turn, -1), inputs.need_values(self)
        if self.value_at is ValueAt.FIRST_TOKEN:
            turn_values = inputs.turn_values(values)
        else:
            turn_values = at_turn_end(values.float(), turn=turn)
        parameters = {"gamma": inputs.at_tokens(self.gamma), "lam": inputs.at_tokens(self.lam)}
        pair = turn_gae(inputs.rewards, turn_values, turn, bootstrap=inputs.bootstrap, **parameters)
        return finish(*pair, inputs)
