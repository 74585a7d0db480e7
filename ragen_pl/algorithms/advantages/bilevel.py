"""Bi-level advantage estimation: across turns first, then inside each turn (TRICO), unbiased and as published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.gae import masked_gae
from ragen_pl.algorithms.credit import AdvantageInputs, Advantages, Estimator, finish
from ragen_pl.algorithms.scan import next_on_mask, reverse_scan
from ragen_pl.algorithms.turns import sum_at_turn_end, turn_ends
from ragen_pl.algorithms.whitening import AllReduce
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Fraction


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
    turn_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages on two time scales (VAGEN, bi-level GAE).

    Over the turns 1 … K with values U_k: `delta_k = r_k + gamma_turn U_{k+1} - U_k` and
    `A_k = delta_k + gamma_turn lam_turn A_{k+1}`, r_k being the sum of the turn's token rewards.
    The turn's return `R_k = A_k + U_k` then stands as the reward at the turn's last token of a token-level
    estimate with gamma_token and lam_token that ends with the turn. A turn without reward is a
    turn; with all four parameters 1 the result is that of `masked_gae`.

    As published, U_k is V at the turn's last token. That value is read where the turn is nearly over, and which
    token ends it is the policy's choice, so with `lam_turn < 1` the bootstrap depends on the action. With U_k the value
    before the turn's first token the estimate has no such bias (`AdvantageInputs.turn_values`).

    RAGEN's code is the published form with `gamma_token = gamma` and `lam_turn = lam_token = lam`.

    Args:
        rewards: `[trajectories, tokens]`.
        values: `[trajectories, tokens]`.
        turn: int64 `[trajectories, tokens]`, not decreasing along a row; -1 off the mask.
        gamma_turn: Discount per turn; `[trajectories, tokens]` where it varies, read at turn ends.
        lam_turn: Decay of the trace per turn; `[trajectories, tokens]` where it varies, read at turn ends.
        gamma_token: Discount per token inside a turn.
        lam_token: Decay of the trace per token inside a turn.
        bootstrap: `[trajectories]`, the value after the last turn; 0 where the task ended.
        turn_values: `[trajectories, tokens]`, U_k, read at turn ends. None for the published form.

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
    turn_advantages, turn_returns = masked_gae(
        turn_rewards,
        values if turn_values is None else turn_values,
        ends,
        gamma=gamma_turn,
        lam=lam_turn,
        bootstrap=bootstrap,
    )
    following = next_on_mask(values, mask=mask, last=torch.zeros_like(values[:, 0]))
    # At the turn's last token the token-level delta is R_k + 0 - V; as published that is A_k itself.
    at_end = turn_advantages if turn_values is None else turn_returns - values
    delta = torch.where(ends, at_end, gamma_token * following - values)
    trace = torch.where(ends, 0.0, torch.full_like(values, gamma_token * lam_token))
    decay = torch.where(mask, trace, 1.0)
    scanned = reverse_scan(torch.where(mask, delta, 0.0), decay=decay)
    advantages = torch.where(mask, scanned, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


@checked
@dataclass(frozen=True, kw_only=True)
class BilevelGAE(Estimator):
    """GAE across turns, then inside each turn (TRICO), with VAGEN's two sources of bias removed.

    The value of a turn is read before its first token, and a token outside M_adv takes its neighbor's return less its
    own value. `published=true` is the estimator of VAGEN (Wang et al., 2025): the value of a turn is read before its
    last token, and a token outside M_adv takes its neighbor's advantage. Its expected gradient is off in direction by
    1 to 9% for `lam_turn < 1` and by 7 to 36% for an M_adv that ends with the action (docs/algorithms.md).

    `gamma_turn` defaults below 1: with all four at 1 this is `MaskedGAE`. A turn that does not advance has
    `gamma_turn = lam_turn = 1`.

    Attributes:
        gamma_turn: Discount across turns.
        gamma_token: Discount inside a turn.
        lam_turn: Lambda of GAE across turns.
        lam_token: Lambda of GAE inside a turn.
        published: Use the estimator as VAGEN publishes it.
    """

    needs_trust = ()

    needs_values: ClassVar[bool] = True
    gamma_turn: Fraction = 0.95
    gamma_token: Fraction = 1.0
    lam_turn: Fraction = 1.0
    lam_token: Fraction = 1.0
    published: bool = False

    def turn_values(self, inputs: AdvantageInputs) -> Tensor:
        """Return the value of each token's turn, `[trajectories, tokens]`, read at turn ends."""
        values = inputs.need_values(self)
        return values if self.published else inputs.turn_values(values)

    def discounts(self, inputs: AdvantageInputs) -> float | Tensor:
        """Return gamma_turn, or one for each turn at its end, `[trajectories, tokens]`."""
        return self.gamma_turn

    @property
    def turn_discount(self) -> float | None:
        """The discount across turns; None if tokens are discounted too."""
        return self.gamma_turn if self.gamma_token == 1 else None

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `bilevel_gae` to the tokens of M_adv."""
        values = inputs.need_values(self)
        pair = bilevel_gae(
            inputs.rewards,
            values,
            torch.where(inputs.advantage_mask, inputs.turn, -1),
            gamma_turn=inputs.at_tokens(self.discounts(inputs)),
            lam_turn=inputs.at_tokens(self.lam_turn),
            gamma_token=self.gamma_token,
            lam_token=self.lam_token,
            bootstrap=inputs.bootstrap,
            turn_values=None if self.published else self.turn_values(inputs),
        )
        return finish(*pair, inputs, values=None if self.published else values)
