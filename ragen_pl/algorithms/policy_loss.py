"""The clipped surrogate of PPO per token, with separate bounds and an optional dual clip.

How token losses become one number is in `aggregation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt
from torch import Tensor

from ragen_pl.algorithms.aggregation import Aggregation
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Positive, PositiveFraction, shown

# keeps exp() finite in float32, as the public implementations do
LOG_RATIO_LIMIT = 20.0


@dataclass(kw_only=True, slots=True)
class SurrogateLoss:
    """Token losses and sums for metrics; the sums add up over microbatches and ranks.

    Attributes:
        losses: float32 `[batch, time]`, 0 off the mask.
        clipped_low: Number of tokens held at the lower bound.
        clipped_high: Number of tokens held at the upper bound.
        dual_clipped: Number of tokens held by the dual clip.
        approx_kl: KL(behavior || policy) by the k3 estimator, summed over tokens.
        tokens: Number of tokens inside the mask.
    """

    losses: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    dual_clipped: Tensor
    approx_kl: Tensor
    tokens: Tensor


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> SurrogateLoss:
    """Bound how far one update moves the policy from the behavior policy.

    `max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))` with rho the probability ratio (PPO,
    Schulman et al., 2017, eq. 7; separate bounds after DAPO, Yu et al., 2025). With `dual_clip` c
    the loss of tokens with A < 0 is at most `-A c` (Ye et al., 2020). Tokens off the mask have
    ratio 1 and loss 0, whatever they hold.

    Args:
        logprobs: `[batch, time]`, of the policy being trained.
        old_logprobs: `[batch, time]`, before the update.
        advantages: `[batch, time]`.
        mask: Bool `[batch, time]`.
        clip_low: Distance of the lower bound from 1.
        clip_high: Distance of the upper bound from 1.
        dual_clip: Ratio above which a token with A < 0 gets no more gradient, above 1.

    Raises:
        ValueError: `dual_clip` is not above 1, which would also clip tokens with ratio 1.

    >>> up, zero = torch.tensor([[0.6931]]), torch.zeros(1, 1)
    >>> clipped_surrogate(up, zero, torch.ones(1, 1), up > 0, clip_low=0.2, clip_high=0.28).losses
    tensor([[-1.2800]])
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"found dual_clip={dual_clip}, expected above 1; set 3.0, or None for off")
    mask = mask.bool()
    log_ratio = torch.where(mask, logprobs.float() - old_logprobs.float(), 0.0)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
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


@checked
@dataclass(kw_only=True)
class PolicyLoss:
    """The clipped surrogate (PPO) and how its token losses become one number.

    Attributes:
        clip_low: Distance of the lower bound from 1.
        clip_high: Distance of the upper bound from 1.
        dual_clip: Ratio above which a token with a negative advantage gets no more gradient.
        aggregation: How token losses are averaged.
        constant: Number of tokens that a sequence stands for, with aggregation `constant`.
    """

    needs_trust = ()

    has_dual_clip: ClassVar[bool] = True
    """Whether the loss applies `dual_clip`."""

    clip_low: PositiveFraction = 0.2
    clip_high: Positive = 0.2
    dual_clip: Annotated[float, Gt(1)] | None = None
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant: Positive | None = None

    def __post_init__(self) -> None:
        if (self.aggregation is Aggregation.CONSTANT) != (self.constant is not None):
            remedy = "null" if self.constant is not None else "the number of tokens of a sequence"
            raise ValueError(
                f"algorithm.loss.policy.constant={shown(self.constant)} with aggregation={self.aggregation}: "
                "a constant goes with aggregation 'constant', and only with it; "
                f"set algorithm.loss.policy.constant={remedy}"
            )
        if self.dual_clip is not None and not self.has_dual_clip:
            raise ValueError(
                f"algorithm.loss.policy.dual_clip={self.dual_clip}: {type(self).__name__} has no dual clip; "
                "set dual_clip=null"
            )

    @property
    def setting_of_rows(self) -> str | None:
        """The setting that depends on how episodes are divided into rows; None without one."""
        return f"aggregation={self.aggregation}" if self.aggregation.counts_rows else None

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        turn: Tensor,
    ) -> SurrogateLoss:
        """Return the losses of the mask's tokens, `[batch, time]`.

        Args:
            logprobs: `[batch, time]`, of the policy being trained.
            old_logprobs: `[batch, time]`, before the update.
            advantages: `[batch, time]`.
            mask: Bool `[batch, time]`.
            turn: int64 `[batch, time]`, -1 off the sampled tokens.
        """
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return clipped_surrogate(
            logprobs, old_logprobs, advantages, mask, dual_clip=self.dual_clip, **bounds
        )
