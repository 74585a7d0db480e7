"""Bi-level advantage estimation: across turns first, then inside each turn (VAGEN, TRICO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.gae import masked_gae
from ragen_pl.algorithms.credit import Advantages, Credit, Estimator, finish
from ragen_pl.algorithms.scan import next_on_mask, reverse_scan
from ragen_pl.algorithms.turns import sum_at_turn_end, turn_ends
from ragen_pl.algorithms.whitening import AllReduce
from ragen_pl.checked import checked
from ragen_pl.constraints import Fraction


def bilevel_gae(
    rewards: Tensor,
    values: Tensor,
    turn: Tensor,
    *,
    gamma_turn: float | Tensor,
    lam_turn: float | Tensor,
    gamma_token: float,
    lam_token: float,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages on two time scales (VAGEN, bi-level GAE).

    Over the turn ends e_1 … e_K: `delta_k = r_k + gamma_turn V_{e_{k+1}} - V_{e_k}` and
    `A_k = delta_k + gamma_turn lam_turn A_{k+1}`, r_k being the sum of the turn's token rewards.
    The turn's return `R_k = A_k + V_{e_k}` then stands as the reward at e_k of a token-level
    estimate with gamma_token and lam_token that ends with the turn. A turn without reward is a
    turn; with all four parameters 1 the result is that of `masked_gae`.

    RAGEN's code is the case `gamma_token = gamma` and `lam_turn = lam_token = lam`.

    Args:
        rewards: `[trajectories, tokens]`.
        values: `[trajectories, tokens]`.
        turn: int64 `[trajectories, tokens]`, not decreasing along a row; -1 off the mask.
        gamma_turn: discount per turn; `[trajectories, tokens]` where it varies, read at turn ends.
        lam_turn: decay of the trace per turn; `[trajectories, tokens]` where it varies, read at turn ends.
        gamma_token: discount per token inside a turn.
        lam_token: decay of the trace per token inside a turn.
        bootstrap: `[trajectories]`, the value after the last turn; 0 where the task ended.

    Returns:
        Advantages and returns (advantage plus value), each float32 `[trajectories, tokens]`, 0 off
        the mask.

    >>> rewards, values = torch.tensor([[0.0, 1.0, 0.0, 2.0]]), torch.zeros(1, 4)
    >>> turn = torch.tensor([[0, 0, 1, 1]])
    >>> half = {"gamma_turn": 0.5, "lam_turn": 1.0, "gamma_token": 1.0, "lam_token": 1.0}
    >>> bilevel_gae(rewards, values, turn, **half)[0]
    tensor([[2., 2., 2., 2.]])
    """
    mask, ends, values = turn >= 0, turn_ends(turn), values.float()
    turn_rewards = sum_at_turn_end(rewards.float(), turn=turn)
    turn_advantages, _ = masked_gae(
        turn_rewards, values, ends, gamma=gamma_turn, lam=lam_turn, bootstrap=bootstrap
    )
    following = next_on_mask(values, mask=mask, last=torch.zeros_like(values[:, 0]))
    # At e_k the token-level delta is R_k + 0 - V_{e_k}, which is A_k itself.
    delta = torch.where(ends, turn_advantages, gamma_token * following - values)
    trace = torch.where(ends, 0.0, torch.full_like(values, gamma_token * lam_token))
    decay = torch.where(mask, trace, 1.0)
    scanned = reverse_scan(torch.where(mask, delta, 0.0), decay=decay)
    advantages = torch.where(mask, scanned, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


@checked
@dataclass(frozen=True, kw_only=True)
class BilevelGAE(Estimator):
    """GAE across turns, then inside each turn (VAGEN; TRICO).

    `gamma_turn` defaults below 1: with all four at 1 this is `MaskedGAE`. A turn that does not advance has
    `gamma_turn = lam_turn = 1`.

    Attributes:
        gamma_turn: discount across turns.
        gamma_token: discount inside a turn.
        lam_turn: lambda of GAE across turns.
        lam_token: lambda of GAE inside a turn.
    """

    needs_values: ClassVar[bool] = True
    gamma_turn: Fraction = 0.95
    gamma_token: Fraction = 1.0
    lam_turn: Fraction = 1.0
    lam_token: Fraction = 1.0

    def discounts(self, credit: Credit) -> float | Tensor:
        """Return gamma_turn, or one for each turn at its end, `[trajectories, tokens]`."""
        return self.gamma_turn

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Apply `bilevel_gae` to the tokens of M_adv."""
        pair = bilevel_gae(
            credit.rewards,
            credit.need_values(self),
            torch.where(credit.advantage_mask, credit.turn, -1),
            gamma_turn=credit.at_tokens(self.discounts(credit)),
            lam_turn=credit.at_tokens(self.lam_turn),
            gamma_token=self.gamma_token,
            lam_token=self.lam_token,
            bootstrap=credit.bootstrap,
        )
        return finish(*pair, credit)
