"""The critic's squared error per token, optionally clipped around the old values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True)
class ValueLoss:
    """Token losses and sums; the sums add up over microbatches and ranks.

    Attributes:
        losses: float32 `[batch, time]`, 0 off the mask.
        clipped: Number of tokens held by the clip.
        tokens: Number of tokens inside the mask.
    """

    losses: Tensor
    clipped: Tensor
    tokens: Tensor


def value_loss(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
) -> ValueLoss:
    """Return half the squared error, with values clipped to a distance of `clip` from those of the rollout.

    `max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2`, the value clipping of PPO's
    first implementation; without `clip` it is `(V - R)^2 / 2`.

    Args:
        values: `[batch, time]`, of the critic being trained.
        returns: `[batch, time]`.
        mask: Bool `[batch, time]`, M_adv, where returns are defined.
        old_values: `[batch, time]`, values that the advantages were estimated with.
        clip: Largest distance from `old_values`.

    Raises:
        ValueError: `clip` without `old_values`.

    >>> unit, mask = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    >>> value_loss(3 * unit, unit, mask, old_values=4 * unit, clip=0.5).losses
    tensor([[3.1250]])
    """
    if clip is not None and old_values is None:
        raise ValueError(f"found clip={clip} without old_values; pass old_values or set clip=None")
    mask, values = mask.bool(), values.float()
    # Set to 0 before squaring: otherwise a NaN off the mask reaches the gradient.
    error = torch.where(mask, values - returns.float(), 0.0).square()
    clipped = torch.zeros_like(mask)
    if clip is not None and old_values is not None:
        near = values.clamp(old_values.float() - clip, old_values.float() + clip)
        held = torch.where(mask, near - returns.float(), 0.0).square()
        clipped, error = held > error, torch.maximum(held, error)
    return ValueLoss(losses=0.5 * error, clipped=clipped.sum(), tokens=mask.sum())
