"""Critic-free advantages without groups: REINFORCE++, raw returns (ARPO), batch scale (BRPO)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_pl.algorithms.credit import (
    AdvantageInputs,
    Advantages,
    Estimator,
    StandardizationScope,
    broadcast,
    finish,
)
from ragen_pl.algorithms.scan import reverse_scan
from ragen_pl.algorithms.whitening import AllReduce, masked_moments, whiten
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Fraction


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Sum the remaining rewards, discounted once per token of the mask.

    Args:
        rewards: `[trajectories, tokens]`; those off the mask are not read.
        mask: Bool `[trajectories, tokens]`.
        gamma: Discount per token of the mask.

    Returns:
        float32 `[trajectories, tokens]`, 0 off the mask.

    >>> mask = torch.tensor([[True, False, True]])
    >>> discounted_returns(torch.tensor([[0.0, 9.0, 1.0]]), mask, gamma=0.5)
    tensor([[0.5000, 0.0000, 1.0000]])
    """
    mask = mask.bool()
    inside = torch.where(mask, rewards.float(), 0.0)
    decay = torch.where(mask, torch.full_like(inside, gamma), 1.0)
    return torch.where(mask, reverse_scan(inside, decay=decay), 0.0)


def reinforce_plus_plus(
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    center: Tensor | None = None,
    all_reduce: AllReduce | None = None,
) -> tuple[Tensor, Tensor]:
    """Whiten discounted returns-to-go over the whole batch (REINFORCE++; Hu, 2025).

    Args:
        rewards: `[trajectories, tokens]`.
        mask: Bool `[trajectories, tokens]`.
        gamma: Discount per token of the mask.
        center: `[trajectories]`, subtracted from every return-to-go; None for 0.
        all_reduce: Sums a tensor over the ranks; None on one rank.

    Returns:
        Advantages and returns, each float32 `[trajectories, tokens]`, 0 off the mask.

    >>> rewards, mask = torch.tensor([[1.0], [3.0]]), torch.ones(2, 1, dtype=torch.bool)
    >>> reinforce_plus_plus(rewards, mask, gamma=1.0)[0]
    tensor([[-0.7071],
            [ 0.7071]])
    """
    returns = discounted_returns(rewards, mask, gamma=gamma)
    if center is not None:
        returns = torch.where(mask.bool(), returns - center[:, None], 0.0)
    return whiten(returns, mask, all_reduce=all_reduce), returns


def raw(returns: Tensor) -> Tensor:
    """Take trajectory returns as they are (ARPO in RAGEN's ladder of normalizations).

    Args:
        returns: `[trajectories]`.

    Returns:
        float32 `[trajectories]`.

    >>> raw(torch.tensor([1, 3]))
    tensor([1., 3.])
    """
    return returns.float()


def batch(returns: Tensor, *, eps: float = 1e-6, all_reduce: AllReduce | None = None) -> Tensor:
    """Standardize trajectory returns over the whole batch (BRPO in RAGEN's ladder).

    `(R - mean) / (std + eps)` with the unbiased std; a batch of one, or of equal returns, gets 0.

    Args:
        returns: `[trajectories]`.
        eps: Added to the deviation.
        all_reduce: Sums a tensor over the ranks; None on one rank.

    Returns:
        float32 `[trajectories]`.

    >>> batch(torch.tensor([1.0, 3.0]))
    tensor([-0.7071,  0.7071])
    """
    everywhere = torch.ones_like(returns, dtype=torch.bool)
    mean, variance = masked_moments(returns, everywhere, all_reduce=all_reduce)
    standardized = (returns.float() - mean) / (variance.sqrt() + eps)
    return torch.where(variance > 0, standardized, 0.0)


@checked
@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(Estimator):
    """Discounted returns-to-go, whitened over the whole batch (REINFORCE++)."""

    needs_trust = ()

    gamma: Fraction = 1.0

    @property
    def baseline(self) -> StandardizationScope | None:
        """The batch, whose mean is subtracted at each token."""
        return "batch"

    @property
    def turn_discount(self) -> float | None:
        """1 without a discount; None if tokens are discounted."""
        return 1.0 if self.gamma == 1 else None

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `reinforce_plus_plus` to the tokens of M_adv."""
        pair = reinforce_plus_plus(
            inputs.rewards,
            inputs.advantage_mask,
            gamma=self.gamma,
            center=inputs.center,
            all_reduce=all_reduce,
        )
        return finish(*pair, inputs)


@dataclass(frozen=True, kw_only=True)
class RawReturn(Estimator):
    """Returns as they are (ARPO)."""

    needs_trust = ()

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `raw` to the returns."""
        return broadcast(raw(inputs.returns), inputs)


@dataclass(frozen=True, kw_only=True)
class BatchRelative(Estimator):
    """Returns standardized over the whole batch, all ranks included (BRPO)."""

    needs_trust = ()

    @property
    def standardizes(self) -> StandardizationScope | None:
        """The batch."""
        return "batch"

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `batch` to the returns."""
        return broadcast(batch(inputs.returns, all_reduce=all_reduce), inputs)
