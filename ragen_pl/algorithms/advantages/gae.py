"""Generalized advantage estimation that steps over tokens outside the mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragen_pl.algorithms.credit import AdvantageInputs, Advantages, Estimator, finish
from ragen_pl.algorithms.scan import next_on_mask, reverse_scan
from ragen_pl.algorithms.whitening import AllReduce
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Fraction


def masked_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float | Tensor,
    lam: float | Tensor,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages over the tokens of the mask as if the others did not exist.

    `delta_t = r_t + gamma V_{t+1} - V_t` and `A_t = delta_t + gamma lam A_{t+1}`, where t+1 is the
    next token inside the mask (Schulman et al., 2016, eqs. 11 and 16). Tokens outside are neither
    read nor discounted over. The accumulation runs in float32.

    Args:
        rewards: `[trajectories, tokens]`.
        values: `[trajectories, tokens]`, the value of the state in which the token is sampled.
        mask: Bool `[trajectories, tokens]`.
        gamma: Discount per token of the mask; `[trajectories, tokens]` where it varies, each token's own the
            discount of what follows it.
        lam: Decay of the trace per token of the mask; `[trajectories, tokens]` where it varies.
        bootstrap: `[trajectories]`, the value after the last token; 0 where the task ended. None
            stands for 0 everywhere.

    Returns:
        Advantages and returns (advantage plus value), each float32 `[trajectories, tokens]`, 0 off
        the mask.

    >>> rewards, values = torch.tensor([[0.0, 7.0, 1.0]]), torch.tensor([[0.5, 7.0, 0.25]])
    >>> mask = torch.tensor([[True, False, True]])
    >>> masked_gae(rewards, values, mask, gamma=1.0, lam=0.5)[0]
    tensor([[0.1250, 0.0000, 0.7500]])
    """
    mask = mask.bool()
    rewards, values = rewards.float(), values.float()
    last = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap.float()
    following = next_on_mask(values, mask=mask, last=last)
    # where, not a product: a value off the mask may be anything, NaN included.
    discount = torch.as_tensor(gamma, dtype=torch.float64, device=values.device)
    delta = torch.where(mask, rewards + discount.float() * following - values, 0.0)
    decay = torch.where(mask, (discount * lam).float().expand_as(values), 1.0)
    advantages = torch.where(mask, reverse_scan(delta, decay=decay), 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


@checked
@dataclass(frozen=True, kw_only=True)
class MaskedGAE(Estimator):
    """Token-level GAE over M_adv (StarPO with a critic)."""

    needs_trust = ()

    needs_values: ClassVar[bool] = True
    gamma: Fraction = 1.0
    lam: Fraction = 1.0

    @property
    def turn_discount(self) -> float | None:
        """1 without a discount; None if tokens are discounted."""
        return 1.0 if self.gamma == 1 else None

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `masked_gae` to the tokens of M_adv."""
        mask, values = inputs.advantage_mask, inputs.need_values(self)
        parameters = {"gamma": self.gamma, "lam": self.lam}
        pair = masked_gae(inputs.rewards, values, mask, bootstrap=inputs.bootstrap, **parameters)
        return finish(*pair, inputs, values=values)
