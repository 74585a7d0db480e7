"""Masked mean, variance and whitening over the tokens of the whole batch, all ranks included.

Elements that are equal but for rounding (`algorithms.equality`) have the variance 0, and are whitened to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ragen_pl.algorithms.equality import EQUAL

AllReduce: TypeAlias = Callable[[Tensor], Tensor]
"""Sums a small tensor over the ranks and returns the sum."""


def masked_moments(
    x: Tensor, mask: Tensor, *, all_reduce: AllReduce | None = None
) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance of the elements inside the mask.

    The squares are taken around the global mean, which needs a second reduction: plain sums of
    squares lose precision in float32 where the mean is large.

    Args:
        x: Any shape.
        mask: Bool, same shape.
        all_reduce: Sums a tensor over the ranks; None on one rank.

    Returns:
        Mean and variance, float32 scalars; both 0 where the mask is empty, and the variance 0
        where it holds one element or equal ones.

    >>> masked_moments(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
    (tensor(2.), tensor(2.))
    """
    reduce = all_reduce if all_reduce is not None else _identity
    mask = mask.bool()
    inside = torch.where(mask, x.float(), 0.0)
    total, count = reduce(torch.stack([inside.sum(), mask.sum().float()]))
    mean = total / count.clamp(min=1)
    distance = torch.where(mask, inside - mean, 0.0)
    differ = (distance.abs() > EQUAL * mean.abs()).sum().float()
    squares, differing = reduce(torch.stack([distance.square().sum(), differ]))
    return mean, torch.where(differing > 0, squares / (count - 1).clamp(min=1), 0.0)


def whiten(
    x: Tensor, mask: Tensor, *, eps: float = 1e-8, all_reduce: AllReduce | None = None
) -> Tensor:
    """Shift and scale to mean 0 and deviation 1 over the mask.

    Args:
        x: Any shape.
        mask: Bool, same shape. Padding and zero-weight rows belong outside.
        eps: Added to the variance.
        all_reduce: Sums a tensor over the ranks; None on one rank.

    Returns:
        float32, same shape, 0 off the mask.

    >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
    tensor([-0.7071,  0.7071,  0.0000])
    """
    mean, variance = masked_moments(x, mask, all_reduce=all_reduce)
    inside = mask.bool() & (variance > 0)
    return torch.where(inside, (x.float() - mean) * torch.rsqrt(variance + eps), 0.0)


def whiten_by_environment(
    advantages: Tensor,
    mask: Tensor,
    environment: Tensor,
    *,
    environments: int,
    eps: float = 1e-8,
    all_reduce: AllReduce | None = None,
) -> Tensor:
    """Shift and scale advantages to mean 0 and deviation 1 inside each environment, over the tokens of all ranks.

    So an environment whose rewards are ten times as large moves the policy no more (the point of PopArt, Hessel et al.,
    2018, arXiv 1809.04474, there by statistics of the critic's targets).

    Args:
        advantages: `[trajectories, tokens]`.
        mask: Bool `[trajectories, tokens]`.
        environment: int64 `[trajectories]`.
        environments: Number of environments, the same on every rank: also one without a trajectory here is reduced.
        eps: Added to the variance, which is unbiased.
        all_reduce: Sums a tensor over the ranks; None on one rank.

    Returns:
        float32 `[trajectories, tokens]`, 0 off the mask, and in an environment with one token or with equal advantages.

    >>> advantages, mask = torch.tensor([[1.0, 3.0], [10.0, 30.0]]), torch.ones(2, 2)
    >>> whiten_by_environment(advantages, mask, torch.tensor([0, 1]), environments=2)
    tensor([[-0.7071,  0.7071],
            [-0.7071,  0.7071]])
    """
    whitened = torch.zeros(advantages.shape, device=advantages.device)
    for number in range(environments):
        inside = mask.bool() & (environment == number)[:, None]
        whitened += whiten(advantages, inside, eps=eps, all_reduce=all_reduce)
    return whitened


def _identity(x: Tensor) -> Tensor:
    return x
