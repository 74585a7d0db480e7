"""Policy losses with other ratios or bounds than PPO's.

One ratio for a whole response (GSPO), a clipped weight (CISPO), or a bound on the divergence (DPPO).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
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
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Positive, PositiveFraction


def mean_over_response(values: Tensor, mask: Tensor, turn: Tensor) -> Tensor:
    """Give every token of the mask the mean of its turn's values over the mask, row by row.

    Args:
        values: `[batch, time]`.
        mask: Bool `[batch, time]`.
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
    old_logprobs: Tensor,
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
        old_logprobs: `[batch, time]`, before the update.
        advantages: `[batch, time]`.
        mask: Bool `[batch, time]`.
        turn: int64 `[batch, time]`, the response of each token.
        clip_low: Distance of the lower bound from 1; published 3e-4.
        clip_high: Distance of the upper bound from 1; published 4e-4.

    >>> new, turn = torch.tensor([[0.0, 0.2]]), torch.zeros(1, 2, dtype=torch.int64)
    >>> old, mask = torch.zeros(1, 2), turn >= 0
    >>> sequence_surrogate(new, old, mask.float(), mask, turn, clip_low=0.2, clip_high=0.2).losses
    tensor([[-1.1052, -1.1052]])
    """
    mask = mask.bool()
    log_ratio = torch.where(mask, logprobs.float() - old_logprobs.float(), 0.0)
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
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        turn: Tensor,
    ) -> SurrogateLoss:
        """Apply `sequence_surrogate` to the tokens of the mask."""
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return sequence_surrogate(logprobs, old_logprobs, advantages, mask, turn, **bounds)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
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
        old_logprobs: `[batch, time]`, before the update.
        advantages: `[batch, time]`.
        mask: Bool `[batch, time]`.
        clip_low: Distance of the lower bound from 1; 1 for none.
        clip_high: Distance of the upper bound from 1.

    >>> new, old, mask = torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), torch.tensor([[True]])
    >>> cispo(new, old, torch.ones(1, 1), mask, clip_low=1.0, clip_high=2.0).losses
    tensor([[3.]])
    """
    mask = mask.bool()
    inside = torch.where(mask, logprobs.float(), 0.0)
    log_ratio = torch.where(mask, inside.detach() - old_logprobs.float(), 0.0)
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
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        turn: Tensor,
    ) -> SurrogateLoss:
        """Apply `cispo` to the tokens of the mask."""
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return cispo(logprobs, old_logprobs, advantages, mask, **bounds)


class Divergence(StrEnum):
    """Divergence of two policies as that of two outcomes, the sampled token or any other one."""

    TV = "tv"
    KL = "kl"


class Unit(StrEnum):
    """Tokens that share a ratio and a divergence: each its own, those of a response, or all of a sample."""

    TOKEN = "token"
    TURN = "turn"
    SEQUENCE = "sequence"


def binary_divergence(logprobs: Tensor, old_logprobs: Tensor, *, how: Divergence) -> Tensor:
    """Return the divergence of the behavior policy from the policy, estimated from the sampled tokens.

    With p the policy's probability of a token and q that of the behavior policy, `|p - q|` (tv) or
    `q log(q / p) + (1 - q) log((1 - q) / (1 - p))` (kl): at most the divergence over the vocabulary, and not as large
    for a rare token as its ratio (Qi et al., 2026, arXiv 2602.04879, eqs. 13 and 14).

    Args:
        logprobs: Any shape, of the policy.
        old_logprobs: Same shape, before the update.
        how: The divergence.

    Returns:
        float32, same shape.

    >>> new, old = torch.tensor([0.2, 0.9]).log(), torch.tensor([0.1, 0.9]).log()
    >>> binary_divergence(new, old, how=Divergence.TV)
    tensor([0.1000, 0.0000])
    """
    # 1 - p is 0 in float32 for a token that is all but certain
    new, old = logprobs.double().clamp(max=-1e-12), old_logprobs.double().clamp(max=-1e-12)
    if how is Divergence.TV:
        return (new.exp() - old.exp()).abs().float()
    other_new, other_old = -torch.expm1(new), -torch.expm1(old)
    kl = old.exp() * (old - new) + other_old * (other_old / other_new).log()
    return kl.clamp(min=0).float()


def divergence_masked(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    turn: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    divergence: Divergence = Divergence.TV,
    level: Unit = Unit.TOKEN,
) -> SurrogateLoss:
    """Leave out tokens whose update would lead beyond a divergence from the behavior policy (DPPO; Qi et al., 2026).

    `-M A rho` with M 0 where the divergence exceeds its bound and the policy has moved in the advantage's direction
    already: rho > 1 and A > 0, or rho < 1 and A < 0 (arXiv 2602.04879, eqs. 11 and 12). No ratio is clipped. At the
    level of a turn or a sequence rho is the geometric mean of its tokens' ratios, as in GSPO, and the divergence their
    mean; the gradient of a token is still its own.

    Args:
        logprobs: `[batch, time]`, of the policy being trained.
        old_logprobs: `[batch, time]`, before the update.
        advantages: `[batch, time]`.
        mask: Bool `[batch, time]`.
        turn: int64 `[batch, time]`, the response of each token.
        clip_low: Largest divergence of a token with rho < 1 and A < 0; published 0.15 (tv) and 0.05 (kl).
        clip_high: Largest divergence of a token with rho > 1 and A > 0.
        divergence: Measure of the divergence.
        level: Tokens that share a ratio and a divergence.

    >>> new, old = torch.tensor([[0.04, 0.9, 0.9]]).log(), torch.tensor([[0.01, 0.5, 0.8]]).log()
    >>> mask, turn = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.int64)
    >>> divergence_masked(new, old, mask.float(), mask, turn, clip_low=0.15, clip_high=0.15).losses
    tensor([[-4.0000,  0.0000, -1.1250]])
    """
    mask = mask.bool()
    inside, old = (torch.where(mask, each.float(), 0.0) for each in (logprobs, old_logprobs))
    new = inside.detach()
    log_ratio, distance = new - old, binary_divergence(new, old, how=divergence)
    token = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if level is not Unit.TOKEN:
        unit = turn if level is Unit.TURN else torch.zeros_like(turn)
        log_ratio, distance = (mean_over_response(x, mask, unit) for x in (log_ratio, distance))
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    advantages = torch.where(mask, advantages.float(), 0.0)
    high = (advantages > 0) & (log_ratio > 0) & (distance > clip_high)
    low = (advantages < 0) & (log_ratio < 0) & (distance > clip_low)
    losses = -advantages * log_ratio.exp() * (inside - new).exp()
    return SurrogateLoss(
        losses=torch.where(high | low, 0.0, losses),
        clipped_low=low.sum(),
        clipped_high=high.sum(),
        dual_clipped=mask.new_zeros((), dtype=torch.int64),
        approx_kl=(token.exp() - 1 - token).sum(),
        tokens=mask.sum(),
    )


@checked
@dataclass(kw_only=True)
class DivergencePolicyLoss(PolicyLoss):
    """Tokens left out by the divergence from the behavior policy, in place of a clip of their ratio (DPPO).

    `clip_low` and `clip_high` bound the divergence.

    Attributes:
        divergence: Measure of the divergence.
        level: Tokens that share a ratio and a divergence. A sequence is a sample: a response where samples are turns.
    """

    needs_trust = ()

    has_dual_clip: ClassVar[bool] = False
    clip_low: PositiveFraction = 0.15
    clip_high: Positive = 0.15
    divergence: Divergence = Divergence.TV
    level: Unit = Unit.TOKEN

    @property
    def setting_of_rows(self) -> str | None:
        """The aggregation, or the level of a sequence."""
        level = f"level={self.level}" if self.level is Unit.SEQUENCE else None
        return super().setting_of_rows or level

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        turn: Tensor,
    ) -> SurrogateLoss:
        """Apply `divergence_masked` to the tokens of the mask."""
        return divergence_masked(
            logprobs,
            old_logprobs,
            advantages,
            mask,
            turn,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            divergence=self.divergence,
            level=self.level,
        )
