"""The critic's squared error per token, optionally clipped around the old values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True)
class ValueLoss:
    """Token losses and diagnostics; the sums add up over micro-batches and ranks."""

    losses: Tensor  # float32 [batch, time], 0 off the mask
    clipped: Tensor  # tokens held by the clip, a sum
    tokens: Tensor  # tokens inside the mask


def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
) -> ValueLoss:
    """Measure half the squared error, at most `clip` away from the values of the rollout.

    `max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2`, the value clipping of PPO's
    first implementation; without `clip` it is `(V - R)^2 / 2`.

    Args:
        values: `[batch, time]`, of the critic being trained.
        returns: `[batch, time]`.
        mask: bool `[batch, time]`; M_adv, where returns are defined.
        old_values: `[batch, time]`, those the advantages were estimated with.
        clip: how far a value may move; needs `old_values`.

    Raises:
        ValueError: `clip` without `old_values`.

    >>> one, mask = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    >>> value_loss(3 * one, one, mask, old_values=4 * one, clip=0.5).losses
    tensor([[3.1250]])
    """
    if clip is not None and old_values is None:
        raise ValueError(f"found clip={clip} without old_values; pass old_values or set clip=None")
    mask, values = mask.bool(), values.float()
    # Set to 0 before squaring: a NaN off the mask would else come back through the gradient.
    error = torch.where(mask, values - returns.float(), 0.0).square()
    clipped = torch.zeros_like(mask)
    if clip is not None and old_values is not None:
        near = values.clamp(old_values.float() - clip, old_values.float() + clip)
        held = torch.where(mask, near - returns.float(), 0.0).square()
        clipped, error = held > error, torch.maximum(held, error)
    return ValueLoss(losses=0.5 * error, clipped=clipped.sum(), tokens=mask.sum())
