"""GAE while the critic explains the returns, their mean over the batch while it does not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.gae import MaskedGAE, masked_gae
from ragen_pl.algorithms.credit import AdvantageInputs, Advantages, finish
from ragen_pl.algorithms.whitening import AllReduce, masked_moments
from ragen_pl.base.checked import checked


def explained_variance(
    returns: Tensor, values: Tensor, mask: Tensor, *, all_reduce: AllReduce | None = None
) -> Tensor:
    """Return `1 - Var(G - V) / Var(G)` over the mask and all ranks, float32 `[]`; 0 where the returns are equal.

    Args:
        returns: Any shape.
        values: Same shape.
        mask: Bool, same shape.
        all_reduce: Sums a tensor over the ranks; None on one rank.

    >>> explained_variance(torch.tensor([0.0, 2.0]), torch.tensor([0.0, 1.0]), torch.tensor([True, True]))
    tensor(0.7500)
    """
    _, of_returns = masked_moments(returns, mask, all_reduce=all_reduce)
    _, of_errors = masked_moments(returns.float() - values.float(), mask, all_reduce=all_reduce)
    explained = 1 - of_errors / of_returns
    return torch.where(of_returns > 0, explained, 0.0)


@checked
@dataclass(frozen=True, kw_only=True)
class GatedGAE(MaskedGAE):
    """Token-level GAE, or returns less their mean, by what the critic explains (EVPO; Pan et al., 2026).

    With G the discounted and normalized return from a token on and V the critic, `EV = 1 - Var(G - V) / Var(G)` over
    the tokens of M_adv of the whole batch says whether subtracting V lowers the variance of the advantages (arXiv
    2604.19485). While `EV > threshold` the advantages are those of `MaskedGAE`, otherwise `G - mean(G)`. The critic
    learns in both cases, from the targets of `MaskedGAE`. A truncated episode bootstraps in both.

    An episode is in the mean that is subtracted from it, which scales the gradient by the order of one over the number
    of episodes. The choice is made anew in each iteration, from its own episodes; nothing is carried over.

    Attributes:
        gamma: Discount per token.
        lam: Decay of the trace per token, while the critic is used.
        threshold: Explained variance above which the critic is used; published 0.
    """

    needs_trust = ()

    threshold: float = 0.0

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `masked_gae` to the tokens of M_adv, and choose."""
        estimates = super().__call__(inputs, all_reduce=all_reduce)
        mask, values = inputs.advantage_mask, inputs.need_values(self)
        returns, _ = masked_gae(
            inputs.rewards,
            torch.zeros_like(values),
            mask,
            gamma=self.gamma,
            lam=1.0,
            bootstrap=inputs.bootstrap,
        )
        if inputs.center is not None:
            # the values are those of the returns before
            returns = torch.where(mask, returns - inputs.center[:, None], 0.0)
            values = values - inputs.center[:, None]
        explained = explained_variance(returns, values, mask, all_reduce=all_reduce)
        mean, spread = masked_moments(returns, mask, all_reduce=all_reduce)
        if float(explained) > self.threshold:
            return estimates
        centered = torch.where(mask & (spread > 0), returns - mean, 0.0)
        estimates.advantages = finish(centered, returns, inputs).advantages
        return estimates
