"""PolicyModule: the language or vision-language model that acts.

In a plain `Trainer` it learns conversations by cross-entropy. Inside the agent it scores sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ragen_pl.data.batch import Minibatch, Samples, TrajectoryBatch
from ragen_pl.data.loader import whole_minibatch
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.models.packed_rows import can_pack
from ragen_pl.models.truncation import KeptIds, Truncation
from ragen_pl.models.value_head import StateCritic
from ragen_pl.models.vision_parts import vision_weights
from ragen_pl.modules.empty_steps import LeavesEmptySteps
from ragen_pl.modules.forward import (
    LOGITS_MIB,
    Readout,
    ReferenceStates,
    SampledStates,
    find_kept_ids,
    sampled_states,
    score_states,
    tokens_per_chunk,
)
from ragen_pl.modules.optimizers import OptimizerFactory, build_optimizer, module_groups
from ragen_pl.modules.sharding import data_mesh, is_sharded, shard
from ragen_pl.trajectory import Span

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ragen_pl.models.bundle import ModelBundle


T = TypeVar("T")


class TokenScores(NamedTuple):
    """Scores of the sampled tokens, float32 `[rows, time]`, 0 elsewhere.

    A tuple, because FSDP looks for tensors in tuples, lists and dictionaries that a forward returns.
    """

    logprobs: Tensor
    entropy: Tensor
    """Entropy of the distribution over the vocabulary in nats."""
    values: Tensor | None = None
    """V(s_t) of a critic."""
    kl: Tensor | None = None
    """KL(reference ‖ policy) or KL(policy ‖ reference) over the vocabulary."""
    kept_ids: KeptIds | None = None
    """Ids that the engine kept, by `samples.token`; None unless they were asked for."""
    text_logprobs: Tensor | None = None
    """Log-probs of `samples.text` over all ids, likewise; None unless they were asked for."""


class PolicyModule(LeavesEmptySteps):
    """A model that acts.

    Every use of the model in training and scoring is a call of the module, because DDP and FSDP hook that call.

    Args:
        bundle: Model, tokenizer and processor.
        optimizer: Builds the optimizer from parameters, for use in a plain `Trainer`; AdamW at 1e-4 by default.
        update: Memory of its forward and backward passes; None for the defaults.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        *,
        optimizer: OptimizerFactory | None = None,
        update: UpdateSettings | None = None,
    ) -> None:
        super().__init__()
        update = update or UpdateSettings()
        if update.gradient_checkpointing:
            bundle.checkpoint_layers()
        if not update.share_prefix:
            bundle.shares_prefix = False
        # a copy of a policy's bundle has the policy's
        if update.packed is not None:
            bundle.packs_rows = update.packed
        if update.packed and not can_pack(bundle):
            raise ValueError(
                f"update.packed=true: the bounds of rows are not all that attention in {bundle.facts.family} needs, as "
                "it is loaded; set null or false"
            )
        self.bundle = bundle
        self.model = bundle.model
        self.optimizer_factory = optimizer
        self.logits_mib = update.logits_mib
        self.frozen_later: set[str] = set()
        """Names of weights that were trained before they were frozen, so that checkpoints hold them."""

    def freeze_vision(self) -> None:
        """Leave the image encoder and the projector unchanged from now on; do nothing for a text model."""
        trained = {id(weight) for weight in vision_weights(self.model) if weight.requires_grad}
        for name, weight in self.named_parameters():
            if id(weight) in trained:
                weight.requires_grad_(False)
                self.frozen_later.add(name)

    def configure_model(self) -> None:
        """Shard the weights if the Trainer's strategy shards models."""
        if self.device_mesh is not None and not is_sharded(self):
            self.shard(data_mesh(self.device_mesh))

    def shard(self, mesh: DeviceMesh, *, keep_head: bool = False) -> None:
        """Shard the weights over ranks.

        Args:
            mesh: Ranks.
            keep_head: Keep the head whole, for `lm_head` outside of a call; it must be frozen.
        """
        kept = self.model.get_output_embeddings().parameters() if keep_head else ()
        shard(self, mesh, layers=self.bundle.layers, kept=kept)

    def weights(self, *, adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the present weights under the names of their checkpoint; see `EnginePolicy`."""
        from ragen_pl.models.checkpoint_weights import weights_for_engine

        return weights_for_engine(self.model, adapters=adapters)

    def compute(self, work: Callable[[ModelBundle], T]) -> T:
        """Return the result of a function of the present weights; all ranks must call it if they are sharded."""
        if not is_sharded(self):
            return work(self.bundle)
        result: T = self(None, (), microbatches=((),), readout=lambda bundle, *_: work(bundle))
        return result

    def trained_weights(self) -> dict[str, Tensor]:
        """Return copies of the weights that are trained, on the host, by name; they must not be sharded."""
        return {
            name: weight.detach().to("cpu", copy=True)
            for name, weight in self.named_parameters()
            if weight.requires_grad
        }

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits `[…, vocab]` of hidden states `[…, hidden]`."""
        return self.bundle.lm_head(hidden)

    def forward(
        self,
        samples: Samples,
        images: Sequence[Tensor],
        *,
        microbatches: Sequence[Tensor] | None = None,
        readout: Readout | None = None,
    ) -> Any:
        """Run the model over samples with the present weights.

        Args:
            samples: Sequences.
            images: Images that `samples.image_index` refers to, each uint8 `[height, width, 3]`.
            microbatches: Rows that are computed together; all by default.
            readout: What is computed; a `TokenReadout` by default, which returns `TokenScores`.
        """
        readout = readout or TokenReadout(logits_mib=self.logits_mib)
        return readout(self.bundle, samples, images, microbatches or [torch.arange(len(samples))])

    def supervised_loss(self, batch: Minibatch) -> Tensor:
        """Return the cross-entropy of the responses by their weights, averaged over the step's trained tokens."""
        readout = TokenReadout(entropy_gradient=False, logits_mib=self.logits_mib)
        samples = batch.samples
        scores: TokenScores = self(
            samples, batch.images, microbatches=batch.microbatches, readout=readout
        )
        weighted = scores.logprobs * samples.loss_weight * samples.weight[:, None]
        return -weighted.sum() * batch.scale / batch.loss_tokens

    def on_fit_start(self) -> None:
        """Switch to train mode: models are built and loaded in eval mode, and Lightning keeps the mode."""
        self.train()

    def has_tokens(self, batch: Minibatch) -> dict[str, Tensor]:
        """Return whether the step has a token in M_loss."""
        return {"policy": batch.counted[0]}

    def training_step(self, batch: Minibatch | TrajectoryBatch, batch_idx: int) -> Tensor:
        """Learn the batch's responses.

        Args:
            batch: A minibatch of a `MinibatchLoader`, or a whole batch of a `DataLoader` whose `collate_fn` makes it,
                such as `conversation_batch`.
            batch_idx: Number of the batch.
        """
        if isinstance(batch, TrajectoryBatch):
            batch = whole_minibatch(batch)
            self.note_tokens(batch)
        loss = self.supervised_loss(batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of a policy that is trained alone."""
        factory = self.optimizer_factory or partial(torch.optim.AdamW, lr=1e-4)
        return build_optimizer(factory, module_groups(self))


@dataclass(frozen=True, slots=True)
class TokenReadout:
    """Reads `TokenScores` of the sampled tokens.

    The head computes the logits in chunks. If the samples have more than one chunk of tokens, the backward pass
    computes the logits again, so those of one chunk exist at a time.

    Attributes:
        critic: Critic that shares the policy's states and reads values from them.
        reference: Reference's states of the sampled tokens by row and column, for the divergence over the vocabulary.
        entropy_gradient: Whether the entropy has a gradient, which takes memory.
        logits_mib: MiB of a chunk's float32 logits.
        kept_ids: Ids that sampling kept by row and column, to which the distributions are restricted; None for all.
        truncation: Truncation of the engine that sampled with the present weights: finds the ids that it kept and
            restricts the distributions to them; None for none.
        text: Whether the environment's text that is predicted is scored too.
    """

    critic: StateCritic | None = None
    reference: ReferenceStates | None = None
    entropy_gradient: bool = True
    logits_mib: float = LOGITS_MIB
    kept_ids: KeptIds | None = None
    truncation: Truncation | None = None
    text: bool = False

    def __call__(
        self,
        bundle: ModelBundle,
        samples: Samples,
        images: Sequence[Tensor],
        microbatches: Sequence[Tensor],
    ) -> TokenScores:
        """Return the scores."""
        places: list[Tensor] = []
        parts: dict[str, list[Tensor]] = {}
        found: list[KeptIds] = []
        tokens: list[Tensor] = []
        numbers = _numbers(samples)
        chunk = tokens_per_chunk(bundle, self.logits_mib)
        scored = samples.turn >= 0
        if self.text:
            scored = scored | (samples.text > 0)
        recompute = int(scored.sum()) > chunk
        shown: list[SampledStates] = []
        text_logprobs: list[Tensor] = []
        for states in sampled_states(bundle, samples, images, microbatches, text=self.text):
            at = (states.rows, states.columns)
            reference = self.reference
            if reference is not None:
                reference = reference.select(numbers[at])
            kept_ids = None
            if self.kept_ids is not None:
                kept_ids = self.kept_ids.select(numbers[at]).to(states.hidden.device)
            if self.truncation is not None:
                kept_ids = self._find_kept_ids(bundle, samples, states, chunk=chunk)
                found.append(kept_ids.to(torch.device("cpu")))
                tokens.append(samples.token[at].cpu())
            scores = score_states(
                bundle,
                states.hidden,
                samples.input_ids[at],
                temperature=samples.temperature[at],
                chunk=chunk,
                recompute=recompute,
                entropy_gradient=self.entropy_gradient,
                reference=reference,
                kept=kept_ids,
            )
            if states.text is not None:
                shown.append(states.text)
                text_logprobs.append(
                    self._text_logprobs(
                        bundle, samples, states.text, chunk=chunk, recompute=recompute
                    )
                )
            values = None if self.critic is None else self.critic.read(states.hidden)
            places.append(states.rows * samples.input_ids.shape[1] + states.columns)
            for name, part in (*scores._asdict().items(), ("values", values)):
                if part is not None:
                    parts.setdefault(name, []).append(part)
        index = torch.cat(places)
        of_text = None
        if shown:
            width = samples.input_ids.shape[1]
            at_text = torch.cat([states.rows * width + states.columns for states in shown])
            of_text = _placed(torch.cat(text_logprobs), at_text, samples)
        return TokenScores(
            **{name: _placed(torch.cat(part), index, samples) for name, part in parts.items()},
            kept_ids=_by_token(found, tokens) if found else None,
            text_logprobs=of_text,
        )

    @staticmethod
    def _text_logprobs(
        bundle: ModelBundle, samples: Samples, states: SampledStates, *, chunk: int, recompute: bool
    ) -> Tensor:
        """Return the log-probs of the environment's text in a microbatch, at temperature 1 and over all ids."""
        tokens = samples.input_ids[states.rows, states.columns]
        scores = score_states(
            bundle,
            states.hidden,
            tokens,
            temperature=torch.ones(len(tokens), device=tokens.device),
            chunk=chunk,
            recompute=recompute,
        )
        return scores.logprobs

    def _find_kept_ids(
        self, bundle: ModelBundle, samples: Samples, states: SampledStates, *, chunk: int
    ) -> KeptIds:
        """Return the ids that the engine kept at the tokens of a microbatch; text that was shown keeps all."""
        assert self.truncation is not None
        at = (states.rows, states.columns)
        shown = samples.spans[at] == Span.SHOWN
        return find_kept_ids(
            bundle,
            states.hidden,
            samples.input_ids[at],
            temperature=samples.temperature[at],
            rollout_logprobs=samples.rollout_logprobs[at].masked_fill(shown, torch.nan),
            truncation=self.truncation,
            chunk=chunk,
        )


@dataclass(frozen=True, slots=True)
class StateReadout:
    """Reads the hidden states that predict the sampled tokens."""

    def __call__(
        self,
        bundle: ModelBundle,
        samples: Samples,
        images: Sequence[Tensor],
        microbatches: Sequence[Tensor],
    ) -> Tensor:
        """Return `[sampled tokens, hidden]` by `samples.token`, on the CPU."""
        tokens = int((samples.turn >= 0).sum())
        result: Tensor | None = None
        for states in sampled_states(bundle, samples, images, microbatches):
            if result is None:
                result = states.hidden.new_empty(tokens, states.hidden.shape[-1], device="cpu")
            result[samples.token[states.rows, states.columns].cpu()] = states.hidden.cpu()
        assert result is not None
        return result


def _by_token(parts: Sequence[KeptIds], tokens: Sequence[Tensor]) -> KeptIds:
    """Return the kept ids of microbatches by the numbers of their tokens, of which some may be repeated."""
    numbers = torch.cat([*tokens])
    place = numbers.new_zeros(int(numbers.max()) + 1 if len(numbers) else 0)
    place[numbers] = torch.arange(len(numbers))
    return KeptIds.join(parts).select(place)


def _placed(values: Tensor, index: Tensor, samples: Samples) -> Tensor:
    """Return `[rows, time]` values from those of the sampled tokens, 0 elsewhere."""
    zeros = values.new_zeros(samples.input_ids.numel())
    return zeros.index_put((index,), values).view(samples.input_ids.shape)


def _numbers(samples: Samples) -> Tensor:
    """Return the number of each sampled token by row and column, int64 `[rows, time]`."""
    sampled = samples.turn >= 0
    return (sampled.flatten().cumsum(0) - 1).view_as(sampled)
