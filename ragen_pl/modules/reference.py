"""The reference policy of a KL penalty: a frozen copy, a moving average, or the policy without its adapters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ragen_pl.algorithms.kl import KLEstimator, kl_estimate
from ragen_pl.constraints import FractionBelowOne, checked
from ragen_pl.data.batch import Samples
from ragen_pl.models.adapters import adapters_off, has_adapters
from ragen_pl.modules.forward import Readout
from ragen_pl.modules.policy import PolicyModule, TokenScores


def divergence(
    scores: TokenScores, samples: Samples, reference: Tensor, *, estimator: KLEstimator
) -> Tensor:
    """Return the policy's divergence from the reference at each token, `[rows, time]`.

    Args:
        scores: Scores of the policy; their `kl` is returned where it was computed over the vocabulary.
        samples: Samples that were scored.
        reference: Log-probs of the sampled tokens, row after row, `[tokens]`.
        estimator: Any estimator but `full`, used where `scores.kl` is None.
    """
    if scores.kl is not None:
        return scores.kl
    reference_logprobs = torch.zeros_like(scores.logprobs)
    reference_logprobs[samples.turn >= 0] = reference
    return kl_estimate(scores.logprobs, reference_logprobs, how=estimator)


class WithoutAdapters:
    """A policy with its adapters switched off. No module, because its weights are saved with the policy."""

    def __init__(self, policy: PolicyModule) -> None:
        self.policy = policy

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits `[…, vocab]` of hidden states `[…, hidden]`."""
        with adapters_off(self.policy.bundle.model):
            return self.policy.lm_head(hidden)

    def __call__(
        self,
        samples: Samples,
        images: Sequence[Tensor],
        *,
        microbatches: Sequence[Tensor] | None = None,
        readout: Readout | None = None,
    ) -> Any:
        """Call the policy without its adapters. The arguments are those of `PolicyModule.forward`."""
        with adapters_off(self.policy.bundle.model):
            return self.policy(samples, images, microbatches=microbatches, readout=readout)


ReferencePolicy = PolicyModule | WithoutAdapters


class Reference(Protocol):
    """How the reference policy is built and how it follows the policy; named by the config."""

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return the reference of a policy with its present weights."""

    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Move the reference; called once an iteration, before credit is assigned."""


@dataclass(frozen=True)
class FrozenCopy:
    """The policy with its initial weights: after the warm start, or as it was loaded."""

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return a copy with frozen weights."""
        bundle = policy.bundle.with_model(copy.deepcopy(policy.bundle.model))
        frozen = PolicyModule(
            bundle, length_buckets=policy.length_buckets, logits_mib=policy.logits_mib
        )
        frozen.requires_grad_(False)
        return frozen.eval()

    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Do nothing."""


@checked
@dataclass(frozen=True, kw_only=True)
class MovingAverage:
    """A moving average of the policy's weights.

    Attributes:
        decay: Share of its own weights that the reference keeps each iteration.
    """

    decay: FractionBelowOne = 0.9

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return a copy with frozen weights."""
        return FrozenCopy().build(policy)

    @torch.no_grad()
    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Move the weights towards the policy's."""
        assert isinstance(reference, PolicyModule)
        for average, weight in zip(reference.parameters(), policy.parameters(), strict=True):
            average.lerp_(weight.to(average.dtype), 1.0 - self.decay)


@dataclass(frozen=True)
class AdaptersOff:
    """The policy with its LoRA adapters switched off, without a second copy of the weights."""

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return the same model without its adapters.

        Raises:
            ValueError: The model has no adapters.
        """
        if not has_adapters(policy.bundle.model):
            raise ValueError(
                f"algorithm.loss.kl.reference=AdaptersOff: {type(policy.model).__name__} has no adapters to switch "
                "off; set model.build.lora, or use FrozenCopy"
            )
        return WithoutAdapters(policy)

    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Do nothing: the weights under the adapters are frozen."""
