"""The reference policy of a KL penalty: a frozen copy, a moving average, or the policy without its adapters."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ragen_pl.algorithms.kl import KLEstimator, kl_estimate
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import FractionBelowOne
from ragen_pl.base.distributed import sharded_like, whole
from ragen_pl.data.batch import Samples
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.distribution import TopLogprobs
from ragen_pl.models.merging import has_adapters
from ragen_pl.modules.forward import Readout
from ragen_pl.modules.optimizers import LOW_PRECISION
from ragen_pl.modules.policy import PolicyModule, TokenScores


def divergence(
    scores: TokenScores, samples: Samples, reference: Tensor, *, estimator: KLEstimator
) -> Tensor:
    """Return the policy's divergence from the reference at each token, `[rows, time]`.

    Args:
        scores: Scores of the policy; their `kl` is returned where it was computed over the vocabulary.
        samples: Samples that were scored.
        reference: Log-probs of the sampled tokens, row after row, `[tokens]`.
        estimator: An estimator of single tokens, used where `scores.kl` is None.
    """
    if scores.kl is not None:
        return scores.kl
    reference_logprobs = torch.zeros_like(scores.logprobs)
    reference_logprobs[samples.turn >= 0] = reference
    return kl_estimate(scores.logprobs, reference_logprobs, how=estimator)


class OtherReference(ABC):
    """Model that the policy is compared with and that is no module: it has no weights of its own here."""

    @property
    @abstractmethod
    def bundle(self) -> ModelBundle:
        """Its model."""

    @abstractmethod
    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits `[…, vocab]` of hidden states `[…, hidden]`."""

    @abstractmethod
    def __call__(
        self,
        samples: Samples,
        images: Sequence[Tensor],
        *,
        microbatches: Sequence[Tensor] | None = None,
        readout: Readout | None = None,
    ) -> Any:
        """Return the readout of samples. The arguments are those of `PolicyModule.forward`."""


class WithoutAdapters(OtherReference):
    """A policy with its adapters switched off. No module, because its weights are saved with the policy."""

    def __init__(self, policy: PolicyModule) -> None:
        self.policy = policy

    @property
    def bundle(self) -> ModelBundle:
        """The policy's model."""
        return self.policy.bundle

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits `[…, vocab]` of hidden states `[…, hidden]`."""
        with self._adapters_off():
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
        with self._adapters_off():
            return self.policy(samples, images, microbatches=microbatches, readout=readout)

    def _adapters_off(self) -> AbstractContextManager[None]:
        from ragen_pl.models.adapters import adapters_off

        return adapters_off(self.policy.bundle.model)


class ServedReference(OtherReference):
    """Model behind a server, which tells log-probs alone."""

    @abstractmethod
    def top_logprobs(self, samples: Samples, number: int) -> TopLogprobs:
        """Return the log-probs of its most likely ids at each sampled token, by token number, on the CPU.

        Args:
            samples: Sequences.
            number: Number k of the ids.
        """


ReferencePolicy = PolicyModule | OtherReference


class Reference(Protocol):
    """Rule by which the reference policy is built and follows the policy; named by the config."""

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return the reference of a policy with its present weights."""

    def store(self, reference: ReferencePolicy, policy: PolicyModule, dtype: torch.dtype) -> None:
        """Store weights that autocast would cast at each use in the cast dtype; called once, before training."""

    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Move the reference; called once an iteration, before credit is assigned."""


@runtime_checkable
class ChecksPolicy(Protocol):
    """Reference that does not fit every policy."""

    def check(self, policy: ModelBundle) -> None:
        """Check that it fits a policy's model; called before anything is trained.

        Raises:
            ConfigError: It does not.
        """


class OfPolicy:
    """Base of references with weights that the policy has or had. Without hints the policy begins as their equal."""


@dataclass(frozen=True)
class FrozenCopy(OfPolicy):
    """The policy with its initial weights: after the warm start, or as it was loaded.

    Weights that the policy does not train are shared with it, such as those under LoRA adapters.
    """

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return a copy with frozen weights."""
        frozen = PolicyModule(_copied(policy), update=UpdateSettings(logits_mib=policy.logits_mib))
        frozen.requires_grad_(False)
        return frozen.eval()

    def store(self, reference: ReferencePolicy, policy: PolicyModule, dtype: torch.dtype) -> None:
        """Cast the decoder's matrices, which autocast casts too. Other weights are computed on in float32."""
        assert isinstance(reference, PolicyModule)
        model = reference.bundle.model
        kept = {id(weight) for weight in policy.parameters()}
        kept.add(id(model.get_input_embeddings().weight))
        for layer in [*model.get_decoder().modules(), model.get_output_embeddings()]:
            if isinstance(layer, nn.Linear) and id(layer.weight) not in kept:
                layer.to(dtype)

    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Do nothing."""


def _copied(policy: PolicyModule) -> ModelBundle:
    """Return a copy of the policy's model that shares its frozen weights."""
    model = policy.bundle.model
    shared = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    return policy.bundle.with_model(copy.deepcopy(model, memo=shared))


class AveragedPolicy(PolicyModule):
    """A policy whose weights are a moving average of another's.

    Averages of weights in low precision are kept in float32, as buffers.

    Args:
        policy: Policy to average.
    """

    def __init__(self, policy: PolicyModule) -> None:
        super().__init__(_copied(policy), update=UpdateSettings(logits_mib=policy.logits_mib))
        pairs = zip(self.named_parameters(), policy.parameters(), strict=True)
        self.averaged = [name for (name, _), weight in pairs if weight.requires_grad]
        self.requires_grad_(False)
        for number, name in enumerate(self.averaged):
            weight = self.get_parameter(name)
            if weight.dtype in LOW_PRECISION:
                self.register_buffer(f"average_{number}", weight.detach().float())

    def shard(self, mesh: DeviceMesh, *, keep_head: bool = False) -> None:
        """Shard the weights and their averages over ranks; see `PolicyModule.shard`."""
        super().shard(mesh, keep_head=keep_head)
        buffers = dict(self.named_buffers(recurse=False))
        for number, name in enumerate(self.averaged):
            average = buffers.get(f"average_{number}")
            if average is not None:
                sharded = sharded_like(average, self.get_parameter(name).data)
                self.register_buffer(f"average_{number}", sharded)

    @torch.no_grad()
    def move(self, policy: PolicyModule, fraction: float) -> None:
        """Move the weights towards a policy's by this fraction of the distance."""
        buffers = dict(self.named_buffers(recurse=False))
        for number, name in enumerate(self.averaged):
            weight = self.get_parameter(name)
            average = buffers.get(f"average_{number}", weight)
            present: Tensor = policy.get_parameter(name)
            if not isinstance(average, DTensor):
                present = whole(present)
            average.lerp_(present.to(average.dtype), fraction)
            if average is not weight:
                weight.copy_(average)


@checked
@dataclass(frozen=True, kw_only=True)
class MovingAverage(OfPolicy):
    """A moving average of the policy's weights.

    Attributes:
        decay: Fraction of its own weights that the reference keeps each iteration.
    """

    needs_trust = ()

    decay: FractionBelowOne = 0.9

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return a copy with frozen weights."""
        return AveragedPolicy(policy).eval()

    def store(self, reference: ReferencePolicy, policy: PolicyModule, dtype: torch.dtype) -> None:
        """Do nothing: an average needs float32."""

    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Move the weights towards the policy's."""
        assert isinstance(reference, AveragedPolicy)
        reference.move(policy, 1.0 - self.decay)


@dataclass(frozen=True)
class AdaptersOff(OfPolicy):
    """The policy with its LoRA adapters switched off, without a second copy of the weights."""

    needs_trust = ()

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return the same model without its adapters.

        Raises:
            ValueError: The model has no adapters, trains other weights too, or its adapters changed the weights under
                them when they were made.
        """
        from ragen_pl.models.adapters import base_is_changed, only_adapters_are_trained

        name = type(policy.model).__name__
        if not has_adapters(policy.bundle.model):
            raise ValueError(
                f"algorithm.loss.kl.reference=AdaptersOff: {name} has no adapters to switch off; set model.build.lora, "
                "or use FrozenCopy"
            )
        if not only_adapters_are_trained(policy.bundle.model):
            raise ValueError(
                f"algorithm.loss.kl.reference=AdaptersOff: {name} trains other weights too, which can't be switched "
                "off; set model.build.freeze_projector=true, or use FrozenCopy"
            )
        if base_is_changed(policy.bundle.model):
            raise ValueError(
                f"algorithm.loss.kl.reference=AdaptersOff: the initial values of {name}'s adapters have changed the "
                "weights under them, so the model without adapters is not the initial policy; use InitialPolicy or "
                "FrozenCopy, or leave out model.build.lora.init_lora_weights"
            )
        return WithoutAdapters(policy)

    def store(self, reference: ReferencePolicy, policy: PolicyModule, dtype: torch.dtype) -> None:
        """Do nothing: the weights are the policy's."""

    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Do nothing: the weights under the adapters are frozen."""


@dataclass(frozen=True)
class InitialPolicy(OfPolicy):
    """The policy with its initial weights, in the cheaper of two ways.

    `AdaptersOff` if only fresh adapters are trained and the weights under them are as loaded, else a `FrozenCopy`.
    """

    needs_trust = ()

    def build(self, policy: PolicyModule) -> ReferencePolicy:
        """Return the reference."""
        model = policy.bundle.model
        if has_adapters(model):
            from ragen_pl.models.adapters import (
                adapters_are_new,
                base_is_changed,
                only_adapters_are_trained,
            )

            new = only_adapters_are_trained(model) and adapters_are_new(model)
            if new and not base_is_changed(model):
                return AdaptersOff().build(policy)
        return FrozenCopy().build(policy)

    def store(self, reference: ReferencePolicy, policy: PolicyModule, dtype: torch.dtype) -> None:
        """Cast a copy's matrices."""
        if isinstance(reference, PolicyModule):
            FrozenCopy().store(reference, policy, dtype)

    def follow(self, reference: ReferencePolicy, policy: PolicyModule) -> None:
        """Do nothing."""
