"""Correction for an engine that samples from a slightly different distribution than the trainer computes.

The trainer's log-probs before the update replace the engine's in the ratio of the policy loss. The loss of
each token is multiplied by a weight made of p_trainer / p_engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Protocol

import torch
from annotated_types import Gt
from torch import Tensor

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import FractionBelowOne, Positive


class Level(StrEnum):
    """Unit that a ratio is computed for: a token, or a response (the product of its tokens' ratios)."""

    TOKEN = "token"
    SEQUENCE = "sequence"


def importance_ratio(trainer: Tensor, rollout: Tensor, turn: Tensor, *, level: Level) -> Tensor:
    """Return p_trainer / p_engine for each token or for its whole response.

    Args:
        trainer: `[trajectories, tokens]`, log-probs before the update.
        rollout: `[trajectories, tokens]`, log-probs of the engine.
        turn: int64 `[trajectories, tokens]`, -1 off the sampled tokens.
        level: Unit that a ratio is computed for.

    Returns:
        float32 `[trajectories, tokens]`, 1 off the sampled tokens.

    >>> new, turn = torch.tensor([[0.5, 1.0]]).log(), torch.zeros(1, 2, dtype=torch.int64)
    >>> importance_ratio(new, torch.tensor([[1.0, 0.25]]).log(), turn, level=Level.SEQUENCE)
    tensor([[2., 2.]])
    """
    sampled = turn >= 0
    log_ratio = torch.where(sampled, trainer.float() - rollout.float(), 0.0)
    if Level(level) is Level.SEQUENCE:
        index = turn.clamp(min=0)
        turns = int(index.max()) + 1 if index.numel() else 1
        total = torch.zeros(turn.shape[0], turns, device=turn.device)
        log_ratio = total.scatter_add(1, index, log_ratio).gather(1, index)
    return torch.where(sampled, log_ratio.clamp(-20.0, 20.0).exp(), 1.0)


class Correction(Protocol):
    """Weight of each token's loss from the log-probs of trainer and engine."""

    def __call__(self, trainer: Tensor, rollout: Tensor, turn: Tensor) -> Tensor:
        """Return weights `[trajectories, tokens]`; the arguments are those of `importance_ratio`."""
        ...


@checked
@dataclass(frozen=True, kw_only=True)
class TruncatedWeights(Correction):
    """Weight equal to the ratio, at most `cap` (truncated importance sampling; Yao et al., 2025)."""

    needs_trust = ()

    cap: Positive = 2.0
    level: Level = Level.TOKEN

    def __call__(self, trainer: Tensor, rollout: Tensor, turn: Tensor) -> Tensor:
        """Return weights `[trajectories, tokens]`."""
        return importance_ratio(trainer, rollout, turn, level=self.level).clamp(max=self.cap)


@checked
@dataclass(frozen=True, kw_only=True)
class MaskedWeights(Correction):
    """Weight equal to the ratio inside the bounds, 0 outside (masked importance sampling)."""

    needs_trust = ()

    low: FractionBelowOne = 0.5
    high: Annotated[float, Gt(1)] = 2.0
    level: Level = Level.TOKEN

    def __call__(self, trainer: Tensor, rollout: Tensor, turn: Tensor) -> Tensor:
        """Return weights `[trajectories, tokens]`."""
        ratio = importance_ratio(trainer, rollout, turn, level=self.level)
        return torch.where((ratio >= self.low) & (ratio <= self.high), ratio, 0.0)
