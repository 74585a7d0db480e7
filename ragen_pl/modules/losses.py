"""The settings of the update's loss, each a small value that a config composes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from torch import Tensor

from ragen_pl.algorithms.aggregation import Aggregation
from ragen_pl.algorithms.kl import KLEstimator
from ragen_pl.algorithms.masks import all_but_action, sampled
from ragen_pl.algorithms.mismatch import Correction
from ragen_pl.algorithms.policy_loss import PolicyLoss
from ragen_pl.constraints import NonNegative, Positive, PositiveFraction, checked
from ragen_pl.modules.importance import Importance
from ragen_pl.modules.reference import FrozenCopy, Reference

Mask = Callable[[Tensor, Tensor], Tensor]
"""(spans, turn index), both `[episodes, tokens]` → bool or, for M_loss, a weight `[episodes, tokens]`."""


class OverlongResponses(StrEnum):
    """What becomes of responses that hit their length limit."""

    KEEP = "keep"
    MASK = "mask"  # out of M_loss; their rewards and values stay


class KLPlace(StrEnum):
    """Where the divergence from the reference is held against the policy."""

    LOSS = "loss"
    REWARD = "reward"  # taken from the rewards of the tokens, by the weights that sampled


@checked
@dataclass(kw_only=True)
class Masks:
    """Which sampled tokens are trained on (M_loss) and which carry credit (M_adv).

    Args:
        loss: M_loss, weights allowed.
        advantage: M_adv, whose tokens are steps or are not.
        top_entropy: share of M_loss's tokens to train on, those of the highest entropy.
        overlong_responses: what becomes of responses that hit their length limit.
        observations: whether text that was shown can be inside the masks (RICO).
        importance: narrows both masks to what matters most for the actions; None leaves them.
    """

    loss: Mask = sampled
    advantage: Mask = sampled
    top_entropy: PositiveFraction = 1.0
    overlong_responses: OverlongResponses = OverlongResponses.KEEP
    observations: bool = False
    importance: Importance | None = None

    def __post_init__(self) -> None:
        if self.importance is not None and self.observations:
            raise ValueError(
                "algorithm.masks.importance: scores choose among sampled tokens, and observations=true trains on "
                "text that was shown; set one of them off"
            )


@checked
@dataclass(kw_only=True)
class ReferenceKL:
    """A penalty on leaving the reference policy, on the tokens of its own mask.

    `estimator` is `full` for KL(reference ‖ policy) summed over the vocabulary, or one of k1, k2, k3 from
    the sampled tokens. k1 in the loss has no gradient on average; it is meant for the reward. With a
    `coefficient` of 0 the reference is kept and not scored, so that the penalty can be switched on later.
    """

    coefficient: NonNegative
    estimator: KLEstimator = KLEstimator.FULL
    mask: Mask = all_but_action
    aggregation: Literal[
        Aggregation.TOKEN_MEAN, Aggregation.SEQ_MEAN_TOKEN_MEAN, Aggregation.SEQ_MEAN_TOKEN_SUM
    ] = Aggregation.SEQ_MEAN_TOKEN_SUM
    place: KLPlace = KLPlace.LOSS
    reference: Reference = field(default_factory=FrozenCopy)


@checked
@dataclass(kw_only=True)
class LossSettings:
    """Everything that the update minimises."""

    policy: PolicyLoss = field(default_factory=PolicyLoss)
    kl: ReferenceKL | None = None
    value_coefficient: NonNegative = 0.5
    value_clip: Positive | None = None
    entropy_coefficient: float = 0.0
    entropy_target: Positive | None = None  # nats: the bonus falls to 0 as entropy rises to it
    whiten: bool = True  # advantages, over all trained tokens of the iteration
    mismatch: Correction | None = None  # of the engine's distribution against the trainer's

    def __post_init__(self) -> None:
        if self.entropy_target is not None and self.entropy_coefficient == 0:
            raise ValueError(
                f"algorithm.loss.entropy_target={self.entropy_target}: there is no entropy bonus to steer; set "
                "algorithm.loss.entropy_coefficient=0.01"
            )

    def entropy_weight(self, entropy: float) -> float:
        """Return the bonus's coefficient at this entropy, `coefficient * clip(1 - entropy / target, 0, 1)`."""
        if self.entropy_target is None:
            return self.entropy_coefficient
        return self.entropy_coefficient * min(1.0, max(0.0, 1.0 - entropy / self.entropy_target))
