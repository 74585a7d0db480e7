"""The policy losses that a config names; each holds its settings and calls a pure function of `algorithms`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ragen_pl.algorithms.aggregation import Aggregation
from ragen_pl.algorithms.policy_loss import SurrogateLoss, clipped_surrogate
from ragen_pl.algorithms.ratio_losses import cispo, sequence_surrogate
from ragen_pl.data.batch import Samples


@dataclass(kw_only=True)
class PolicyLoss:
    """The clipped surrogate (PPO) and how its token losses become one number."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant: float | None = None  # tokens that a sequence stands for, with aggregation "constant"

    def __post_init__(self) -> None:
        self.aggregation = Aggregation(self.aggregation)
        if (self.aggregation is Aggregation.CONSTANT) != (self.constant is not None):
            raise ValueError(
                "algorithm.loss.policy.constant goes with aggregation 'constant', and only with it"
            )

    def token_losses(self, logprobs: Tensor, samples: Samples, mask: Tensor) -> SurrogateLoss:
        """Return the losses of the mask's tokens, `[rows, time]`."""
        return clipped_surrogate(
            logprobs, samples.behavior_logprobs, samples.advantages, mask,
            clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip,
        )  # fmt: skip


@dataclass(kw_only=True)
class SequencePolicyLoss(PolicyLoss):
    """One clipped ratio for each response (GSPO). Its bounds are much narrower than PPO's."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_dual_clip(self)

    def token_losses(self, logprobs: Tensor, samples: Samples, mask: Tensor) -> SurrogateLoss:
        """Return the losses of the mask's tokens, `[rows, time]`."""
        return sequence_surrogate(
            logprobs, samples.behavior_logprobs, samples.advantages, mask, samples.turn,
            clip_low=self.clip_low, clip_high=self.clip_high,
        )  # fmt: skip


@dataclass(kw_only=True)
class ClippedWeightLoss(PolicyLoss):
    """REINFORCE weighed by a clipped ratio without gradient (CISPO)."""

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_dual_clip(self)

    def token_losses(self, logprobs: Tensor, samples: Samples, mask: Tensor) -> SurrogateLoss:
        """Return the losses of the mask's tokens, `[rows, time]`."""
        return cispo(
            logprobs, samples.behavior_logprobs, samples.advantages, mask,
            clip_low=self.clip_low, clip_high=self.clip_high,
        )  # fmt: skip


def _refuse_dual_clip(loss: PolicyLoss) -> None:
    if loss.dual_clip is not None:
        raise ValueError(
            f"algorithm.loss.policy.dual_clip={loss.dual_clip}: {type(loss).__name__} has no dual clip; "
            "set dual_clip=null"
        )
