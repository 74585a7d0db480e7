"""The clipped surrogate of PPO per token, with separate bounds and an optional dual clip.

How token losses become one number is `aggregation`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LOG_RATIO_LIMIT = 20.0  # keeps exp() finite in float32, as the public implementations do


@dataclass(kw_only=True, slots=True)
class SurrogateLoss:
    """Token losses and diagnostics; the sums add up over micro-batches and ranks."""

    losses: Tensor  # float32 [batch, time], 0 off the mask
    clipped_low: Tensor  # tokens held at the lower bound, a sum
    clipped_high: Tensor  # tokens held at the upper bound, a sum
    dual_clipped: Tensor  # tokens held by the dual clip, a sum
    approx_kl: Tensor  # KL(behavior || policy) by the k3 estimator, a sum over tokens
    tokens: Tensor  # tokens inside the mask: divide the sums by it


def clipped_surrogate(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> SurrogateLoss:
    """Bound how far one update moves the policy from the one that sampled.

    `max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))` with rho the probability ratio (PPO,
    Schulman et al., 2017, eq. 7; separate bounds after DAPO, Yu et al., 2025). With `dual_clip` c
    the loss of tokens with A < 0 is at most `-A c` (Ye et al., 2020). Tokens off the mask have
    ratio 1 and loss 0, whatever they hold.

    Args:
        logprobs: `[batch, time]`, of the policy being trained.
        behavior_logprobs: `[batch, time]`, of the distribution sampled from.
        advantages: `[batch, time]`.
        mask: bool `[batch, time]`.
        clip_low: distance of the lower bound from 1.
        clip_high: distance of the upper bound from 1.
        dual_clip: ratio above which a token with A < 0 gets no more gradient, above 1.

    Raises:
        ValueError: `dual_clip` is not above 1, which would flatten tokens no update has touched.

    >>> up, zero = torch.tensor([[0.6931]]), torch.zeros(1, 1)
    >>> clipped_surrogate(up, zero, torch.ones(1, 1), up > 0, clip_low=0.2, clip_high=0.28).losses
    tensor([[-1.2800]])
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"found dual_clip={dual_clip}, expected above 1; set 3.0, or None for off")
    mask = mask.bool()
    log_ratio = torch.where(mask, logprobs.float() - behavior_logprobs.float(), 0.0)
    log_ratio = log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    advantages, ratio = torch.where(mask, advantages.float(), 0.0), log_ratio.exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(free, bounded)
    held = bounded > free
    dual_held = torch.zeros_like(held)
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        dual_held = (advantages < 0) & (ceiling < losses)
        losses = torch.where(dual_held, ceiling, losses)
    return SurrogateLoss(
        losses=losses,
        clipped_low=(held & (ratio < 1)).sum(),
        clipped_high=(held & (ratio > 1)).sum(),
        dual_clipped=dual_held.sum(),
        approx_kl=(ratio - 1 - log_ratio).detach().sum(),
        tokens=mask.sum(),
    )
