"""Policy losses with other ratios than PPO's: one ratio for a whole response (GSPO), or a clipped weight (CISPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragen_pl.algorithms.aggregation import Aggregation
from ragen_pl.algorithms.policy_loss import (
    LOG_RATIO_LIMIT,
    PolicyLoss,
    SurrogateLoss,
    clipped_surrogate,
)
from ragen_pl.checked import checked
from ragen_pl.constraints import Positive, PositiveFraction


def mean_over_response(values: Tensor, mask: Tensor, turn: Tensor) -> Tensor:
    """Give every token of the mask the mean of its turn's values over the mask, row by row.

    Args:
        values: `[batch, time]`.
        mask: bool `[batch, time]`.
        turn: int64 `[batch, time]`, -1 off the sampled tokens.

    >>> values, turn = torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[0, 0, 1]])
    >>> mean_over_response(values, turn >= 0, turn)
    tensor([[2., 2., 9.]])
    """
    first, turns = int(turn.clamp(min=0).min()) if turn.numel() else 0, turn.clamp(min=0)
    shape = (turn.shape[0], (int(turns.max()) if turn.numel() else 0) + 1 - first)
    index = turns - first
    inside = torch.where(mask, values, 0.0)
    total = torch.zeros(shape, dtype=inside.dtype, device=values.device)
    count = torch.zeros_like(total).scatter_add(1, index, mask.to(inside.dtype))
    mean = total.scatter_add(1, index, inside) / count.clamp(min=1)
    return torch.where(mask, mean.gather(1, index), 0.0)


def sequence_surrogate(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    turn: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> SurrogateLoss:
    """Clip one ratio per response, the geometric mean of its tokens' ratios (GSPO-token; Zheng et al., 2025, eq. 14).

    `s_t = sg[s] exp(log p_t - sg[log p_t])` with s the response's ratio. The value of each token's ratio is
    that of its response, and its gradient is its own. With one advantage for the response this is GSPO.

    Args:
        logprobs: `[batch, time]`, of the policy being trained.
        behavior_logprobs: `[batch, time]`, of the behavior policy.
        advantages: `[batch, time]`.
        mask: bool `[batch, time]`.
        turn: int64 `[batch, time]`, the response of each token.
        clip_low: distance of the lower bound from 1; published 3e-4.
        clip_high: distance of the upper bound from 1; published 4e-4.

    >>> new, turn = torch.tensor([[0.0, 0.2]]), torch.zeros(1, 2, dtype=torch.int64)
    >>> old, mask = torch.zeros(1, 2), turn >= 0
    >>> sequence_surrogate(new, old, mask.float(), mask, turn, clip_low=0.2, clip_high=0.2).losses
    tensor([[-1.1052, -1.1052]])
    """
    mask = mask.bool()
    log_ratio = torch.where(mask, logprobs.float() - behavior_logprobs.float(), 0.0)
    of_response = mean_over_response(log_ratio.detach(), mask, turn)
    own = torch.where(mask, logprobs.float() - logprobs.detach().float(), 0.0)
    bounds = {"clip_low": clip_low, "clip_high": clip_high}
    result = clipped_surrogate(
        of_response + own, torch.zeros_like(of_response), advantages, mask, **bounds
    )
    token = log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    result.approx_kl = (token.exp() - 1 - token).sum()
    return result


@checked
@dataclass(kw_only=True)
class SequencePolicyLoss(PolicyLoss):
    """One clipped ratio for each response (GSPO). Its bounds are much narrower than PPO's."""

    needs_trust = ()

    has_dual_clip: ClassVar[bool] = False
    clip_low: PositiveFraction = 3e-4
    clip_high: Positive = 4e-4
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN

    def __call__(
        self,
        logprobs: Tensor,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        turn: Tensor,
    ) -> SurrogateLoss:
        """Apply `sequence_surrogate` to the tokens of the mask."""
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return sequence_surrogate(logprobs, behavior_logprobs, advantages, mask, turn, **bounds)


def cispo(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> SurrogateLoss:
    """Weigh REINFORCE by a clipped ratio that has no gradient (CISPO; MiniMax, 2025, eq. 4).

    `-sg[clip(rho, 1 - clip_low, 1 + clip_high)] A log p`: unlike in PPO no token loses its gradient.

    Args:
        logprobs: `[batch, time]`, of the policy being trained.
        behavior_logprobs: `[batch, time]`, of the behavior policy.
        advantages: `[batch, time]`.
        mask: bool `[batch, time]`.
        clip_low: distance of the lower bound from 1; 1 for none.
        clip_high: distance of the upper bound from 1.

    >>> new, old, mask = torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), torch.tensor([[True]])
    >>> cispo(new, old, torch.ones(1, 1), mask, clip_low=1.0, clip_high=2.0).losses
    tensor([[3.]])
    """
    mask = mask.bool()
    inside = torch.where(mask, logprobs.float(), 0.0)
    log_ratio = torch.where(mask, inside.detach() - behavior_logprobs.float(), 0.0)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio, advantages = log_ratio.exp(), torch.where(mask, advantages.float(), 0.0)
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return SurrogateLoss(
        losses=-weight * advantages * inside,
        clipped_low=(mask & (ratio < 1 - clip_low)).sum(),
        clipped_high=(mask & (ratio > 1 + clip_high)).sum(),
        dual_clipped=mask.new_zeros((), dtype=torch.int64),
        approx_kl=(ratio - 1 - log_ratio).sum(),
        tokens=mask.sum(),
    )


@checked
@dataclass(kw_only=True)
class ClippedWeightLoss(PolicyLoss):
    """REINFORCE weighed by a clipped ratio without gradient (CISPO)."""

    needs_trust = ()

    has_dual_clip: ClassVar[bool] = False
    clip_low: PositiveFraction = 1.0
    clip_high: Positive = 4.0

    def __call__(
        self,
        logprobs: Tensor,
        behavior_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        turn: Tensor,
    ) -> SurrogateLoss:
        """Apply `cispo` to the tokens of the mask."""
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return cispo(logprobs, behavior_logprobs, advantages, mask, **bounds)
