"""The policy that the trained one is held to: a frozen copy, a moving average, or itself without its adapters."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ragen_pl.algorithms.kl import KLEstimator, kl_estimate
from ragen_pl.data.batch import Samples
from ragen_pl.models.adapters import adapters_off, has_adapters
from ragen_pl.modules.policy import PolicyModule, TokenScores


def divergence(
    scores: TokenScores, samples: Samples, reference: Tensor, *, estimator: KLEstimator
) -> Tensor:
    """Return the policy's divergence from the reference at each token, `[rows, time]`.

    Args:
        scores: of the policy; its `kl`, where it was computed over the vocabulary, is the answer.
        samples: that were scored.
        reference: `[tokens]` log-probs of the samples' sampled tokens, row after row, for an estimate.
        estimator: any but `full`, where `scores.kl` is None.
    """
    if scores.kl is not None:
        return scores.kl
    theirs = torch.zeros_like(scores.logprobs)
    theirs[samples.turn >= 0] = reference
    return kl_estimate(scores.logprobs, theirs, how=estimator)


class WithoutAdapters:
    """Asks a policy with its adapters off. No module: its weights are the policy's and are saved there."""

    def __init__(self, policy: PolicyModule) -> None:
        self.policy = policy

    @torch.no_grad()
    def score(self, samples: Samples, pixel_values: Tensor, *, parts: list[Tensor]) -> TokenScores:
        """Score the sampled tokens."""
        with adapters_off(self.policy.bundle.model):
            return self.policy.score(samples, pixel_values, parts=parts)

    def reference_logprobs(
        self, samples: Samples, pixel_values: Tensor, parts: list[Tensor]
    ) -> Tensor:
        """Return log-probs over the vocabulary by token number, `[tokens, vocab]`."""
        with adapters_off(self.policy.bundle.model):
            return self.policy.reference_logprobs(samples, pixel_values, parts)


ReferencePolicy = PolicyModule | WithoutAdapters


class Reference(Protocol):
    """What a config names: how the reference is made, and how it follows the policy."""

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return the reference of a policy as it now is."""

    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Move the reference; called once an iteration, before its credit is assigned."""


@dataclass(frozen=True)
class FrozenCopy:
    """The policy as it was when RL began: the warm start, or the model that was loaded."""

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return a copy whose weights nothing trains."""
        bundle = copy.copy(policy.bundle)
        bundle.model = copy.deepcopy(policy.bundle.model)
        frozen = PolicyModule(bundle, length_buckets=policy.length_buckets)
        frozen.requires_grad_(False)
        return frozen.eval()

    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Stay."""


@dataclass(frozen=True, kw_only=True)
class MovingAverage:
    """Weights that follow the policy's: `decay` of their own and the rest of the policy's, each iteration."""

    decay: float = 0.9

    def __post_init__(self) -> None:
        """Check the range."""
        if not 0 <= self.decay < 1:
            raise ValueError(
                f"algorithm.loss.kl.reference.decay={self.decay}: expected 0 or more, below 1; set 0.9"
            )

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Begin with a copy."""
        return FrozenCopy().build(policy)

    @torch.no_grad()
    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Take a step towards the policy."""
        assert isinstance(reference, PolicyModule)
        for mine, theirs in zip(reference.parameters(), policy.parameters(), strict=True):
            mine.lerp_(theirs.to(mine.dtype), 1.0 - self.decay)


@dataclass(frozen=True)
class AdaptersOff:
    """The policy with its LoRA adapters switched off: no second copy of the weights."""

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return the same model, asked without its adapters.

        Raises:
            ValueError: the model has none.
        """
        if not has_adapters(policy.bundle.model):
            raise ValueError(
                f"algorithm.loss.kl.reference=AdaptersOff: {type(policy.model).__name__} has no adapters to switch "
                "off; set model.build.lora, or use FrozenCopy"
            )
        return WithoutAdapters(policy)

    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Stay: what lies under the adapters is not trained."""
