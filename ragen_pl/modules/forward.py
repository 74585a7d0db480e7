"""Forward passes over samples: the hidden states of each microbatch, and the head on them.

The language-model head runs only on the positions that predict sampled tokens, in chunks, and keeps no logits of a
chunk for the backward pass if there are several. Every image is encoded once in a call, or once in a microbatch where
the features of all would need much memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ragen_pl.data.batch import Samples
from ragen_pl.models.distribution import (
    DistributionScores,
    TopLogprobs,
    TopTokens,
    score_distributions,
)
from ragen_pl.models.inputs import (
    DecoderInputs,
    EncodedImages,
    encode_images,
    run_decoder,
    whole_inputs,
)
from ragen_pl.models.packed_rows import packed_states, packs
from ragen_pl.models.prefix_tree import can_share, tree_of_rows, tree_states
from ragen_pl.models.truncation import KeptIds, Truncation
from ragen_pl.modules.sharding import is_sharded

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

# 880 tokens of a vocabulary of 152k
LOGITS_MIB = 512.0
SHARED_BYTES = 2**29
"""Largest size of image features that microbatches share."""


class Readout(Protocol):
    """Function that the policy or the critic computes from its model, such as `TokenReadout`."""

    def __call__(
        self,
        bundle: ModelBundle,
        samples: Samples,
        images: Sequence[Tensor],
        microbatches: Sequence[Tensor],
    ) -> Any:
        """Run the model and return the result.

        Args:
            bundle: Model of the module that is called.
            samples: Sequences to compute on.
            images: Images that `samples.image_index` refers to, each uint8 `[height, width, 3]`.
            microbatches: Rows that are computed together, each int64 `[rows]`.
        """
        ...


@dataclass(slots=True)
class SampledStates:
    """Hidden states that predict the sampled tokens of one microbatch."""

    rows: Tensor
    """int64 `[tokens]`, row of each token in the samples."""
    columns: Tensor
    """int64 `[tokens]`, position of each token in its row."""
    hidden: Tensor
    """`[tokens, hidden]`, the decoder's state at the position before."""
    text: SampledStates | None = None
    """Those of the environment's text that is predicted; None unless they were asked for."""


def shared_images(
    bundle: ModelBundle, samples: Samples, images: Sequence[Tensor], microbatches: Sequence[Tensor]
) -> Sequence[Tensor] | EncodedImages:
    """Encode all images of the microbatches if several of them show the same one, else return the images.

    Members of a group share images, and so do the samples of an episode with a window of turns. Features of more than
    `SHARED_BYTES` are not held: the images are then encoded for each microbatch.
    """
    each = [samples.image_index[rows].unique() for rows in microbatches]
    shown = torch.cat(each)
    shown = shown[shown >= 0]
    distinct = shown.unique()
    if len(distinct) == len(shown):
        return images
    sizes = Counter(images[number].shape for number in distinct.tolist())
    one_of = {images[number].shape: images[number] for number in distinct.tolist()}
    tokens = sum(
        count * bundle.num_image_tokens(one_of[size].numpy(force=True))
        for size, count in sizes.items()
    )
    if tokens * bundle.hidden_size * bundle.model.dtype.itemsize > SHARED_BYTES:
        return images
    return encode_images(bundle, images, shown)


def sample_inputs(
    bundle: ModelBundle, samples: Samples, images: Sequence[Tensor] | EncodedImages, rows: Tensor
) -> DecoderInputs:
    """Build the decoder inputs of these rows, cut to the longest of them."""
    time = int(samples.length[rows].max())
    return whole_inputs(
        bundle,
        samples.input_ids[rows, :time],
        images=images,
        image_index=samples.image_index[rows],
        patches=samples.patches[rows],
    )


def sampled_states(
    bundle: ModelBundle,
    samples: Samples,
    images: Sequence[Tensor],
    microbatches: Sequence[Tensor],
    *,
    text: bool = False,
) -> Iterator[SampledStates]:
    """Run the decoder on each microbatch and yield the states that predict sampled tokens.

    V(s_t) and the distribution of token t are both read at position t - 1. The shift is made here, once.

    Args:
        bundle: Model.
        samples: Sequences.
        images: Images that `samples.image_index` refers to.
        microbatches: Rows that are computed together.
        text: Whether to yield the states that predict `samples.text` too.
    """
    shared = shared_images(bundle, samples, images, microbatches)
    # ranks with sharded weights wait for each other in every pass, also in those that try a model's layers
    shares = can_share(bundle) and not is_sharded(bundle.first_layer)
    # a backward pass needs what all microbatches keep, so one tree of them all takes no more memory
    together = torch.is_grad_enabled() and (isinstance(shared, EncodedImages) or not len(images))
    for parts in [list(microbatches)] if shares and together else [[rows] for rows in microbatches]:
        yield from _states_of_parts(bundle, samples, shared, parts, text=text, shares=shares)


def _states_of_parts(
    bundle: ModelBundle,
    samples: Samples,
    images: Sequence[Tensor] | EncodedImages,
    parts: list[Tensor],
    *,
    text: bool,
    shares: bool,
) -> Iterator[SampledStates]:
    """Run the decoder on the tree of all rows of the parts where that saves much, else on each part.

    Args:
        bundle: Model.
        samples: Sequences.
        images: Images, or their features.
        parts: Rows that are computed together without a tree.
        text: Whether to yield the states that predict `samples.text` too.
        shares: Whether there may be a tree.
    """
    packed = not is_sharded(bundle.first_layer) and packs(bundle, samples.input_ids.device)
    lengths = [samples.length[rows] for rows in parts]
    positions = sum(int(each.sum() if packed else each.max() * len(each)) for each in lengths)
    bundle.positions.whole += positions
    rows = _Rows.of(bundle, samples, images, torch.cat(parts), text=text)
    tree = None
    if shares:
        tree = tree_of_rows(
            bundle, rows.inputs, rows.lengths, first=rows.first, otherwise=positions
        )
    if tree is not None:
        bundle.positions.computed += len(tree.source)
        place = tree.place[rows.at, rows.before] - tree.first
        yield rows.read(tree_states(bundle, rows.inputs, tree)[place])
        return
    bundle.positions.computed += positions
    for part in parts:
        if len(parts) > 1:
            rows = _Rows.of(bundle, samples, images, part, text=text)
        if packed:
            starts = rows.lengths.cumsum(0) - rows.lengths
            states = packed_states(bundle, rows.inputs, rows.lengths)
            yield rows.read(states[starts[rows.at] + rows.before])
        else:
            states = run_decoder(bundle, rows.inputs, first=rows.first)
            yield rows.read(states[rows.at, rows.before - rows.first])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of samples that are computed together, and the places whose states are read."""

    rows: Tensor
    lengths: Tensor
    inputs: DecoderInputs
    at: Tensor
    """int64 `[tokens]`, place among the rows of each token whose state is read."""
    before: Tensor
    """int64 `[tokens]`, the position before it."""
    first: int
    """First position whose state is read."""
    sampled: Tensor
    """bool `[tokens]`, whether it was sampled."""
    shown: Tensor | None
    """bool `[tokens]`, whether it is text that is predicted; None unless that was asked for."""

    @classmethod
    def of(
        cls,
        bundle: ModelBundle,
        samples: Samples,
        images: Sequence[Tensor] | EncodedImages,
        rows: Tensor,
        *,
        text: bool,
    ) -> _Rows:
        """Build the inputs of these rows."""
        inputs = sample_inputs(bundle, samples, images, rows)
        time = inputs.ids.shape[1]
        sampled = samples.turn[rows, :time] >= 0
        shown = samples.text[rows, :time] > 0 if text else torch.zeros_like(sampled)
        at, columns = (sampled | shown).nonzero(as_tuple=True)
        first = int(columns.min()) - 1 if len(columns) else 0
        lengths = samples.length[rows].to(at.device)
        return cls(
            rows=rows.to(at.device),
            lengths=lengths,
            inputs=inputs,
            at=at,
            before=columns - 1,
            first=first,
            sampled=sampled[at, columns],
            shown=shown[at, columns] if text else None,
        )

    def read(self, hidden: Tensor) -> SampledStates:
        """Return the states that were read, `[tokens, hidden]`."""
        rows, columns = self.rows[self.at], self.before + 1
        if self.shown is None:
            return SampledStates(rows, columns, hidden)
        # text may be trained on as if it were sampled, too
        own, other = (
            SampledStates(rows[each], columns[each], hidden[each])
            for each in (self.sampled, self.shown)
        )
        own.text = other
        return own


class Head(Protocol):
    """A policy's language-model head."""

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits `[…, vocab]` of hidden states `[…, hidden]`."""
        ...


@dataclass(frozen=True, slots=True)
class ReferenceStates:
    """Hidden states of a reference policy that predict sampled tokens, and its head, or what is known without them."""

    head: Head
    hidden: Tensor
    """`[tokens, hidden]`, or `TopLogprobs.logprobs` of `ids`."""
    ids: Tensor | None = None
    """`TopLogprobs.ids`; None for states."""
    reverse: bool = False
    """Whether the divergence is KL(policy ‖ reference) instead of KL(reference ‖ policy)."""
    top: TopTokens | None = None
    """Ids that a divergence from the head's logits tells apart; None for all."""

    def select(self, tokens: Tensor) -> ReferenceStates:
        """Return those of these tokens, int64 `[selected]`."""
        own = tokens.to(self.hidden.device)
        ids = None if self.ids is None else self.ids[own]
        return replace(self, hidden=self.hidden[own], ids=ids)


def tokens_per_chunk(bundle: ModelBundle, logits_mib: float) -> int:
    """Return the number of tokens whose float32 logits take `logits_mib` MiB."""
    vocabulary = bundle.model.get_output_embeddings().weight.shape[0]
    return max(1, int(logits_mib * 2**20 / (4 * vocabulary)))


@torch.no_grad()
def find_kept_ids(
    bundle: ModelBundle,
    hidden: Tensor,
    tokens: Tensor,
    *,
    temperature: Tensor,
    rollout_logprobs: Tensor,
    truncation: Truncation,
    chunk: int,
) -> KeptIds:
    """Return the ids that an engine kept when it sampled tokens, see `Truncation.kept_by_engine`.

    Args:
        bundle: Model, with the weights that sampled them.
        hidden: `[tokens, hidden]`.
        tokens: int64 `[tokens]`.
        temperature: `[tokens]`.
        rollout_logprobs: `[tokens]`, the engine's log-probs; NaN for a token that was not sampled, which keeps all.
        truncation: Truncation of the engine.
        chunk: Number of tokens whose logits are computed at a time.
    """
    parts = []
    columns = (hidden, tokens, temperature, rollout_logprobs)
    for part in zip(*(each.split(chunk) for each in columns), strict=True):
        states, ids, temperatures, logprobs = part
        log_probs = bundle.log_probs(states, temperature=temperatures[:, None])
        parts.append(truncation.kept_by_engine(log_probs, ids, logprobs))
    return KeptIds.join(parts)


def score_states(
    bundle: ModelBundle,
    hidden: Tensor,
    tokens: Tensor,
    *,
    temperature: Tensor,
    chunk: int,
    recompute: bool,
    entropy_gradient: bool = False,
    reference: ReferenceStates | None = None,
    kept: KeptIds | None = None,
) -> DistributionScores:
    """Run the head on hidden states in chunks and return the scores of their tokens.

    Args:
        bundle: Model.
        hidden: `[tokens, hidden]`.
        tokens: int64 `[tokens]`.
        temperature: `[tokens]`.
        chunk: Number of tokens whose logits are computed at a time.
        recompute: Compute the logits of a chunk again in the backward pass, instead of keeping them.
        entropy_gradient: Whether the entropy has a gradient.
        reference: States of the same tokens, for the divergence over the vocabulary.
        kept: Ids that the distributions are restricted to; None for all.
    """

    def score(
        hidden: Tensor,
        tokens: Tensor,
        temperature: Tensor,
        kept: KeptIds | None,
        states: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> DistributionScores:
        given: Tensor | TopLogprobs | None = None
        if reference is not None and states is not None:
            with torch.no_grad():
                given = reference.head.lm_head(states) if ids is None else TopLogprobs(ids, states)
        return score_distributions(
            bundle.lm_head(hidden),
            tokens,
            temperature=temperature[:, None],
            banned=bundle.banned(hidden.device),
            reference=given,
            reverse=reference is not None and reference.reverse,
            top=None if reference is None else reference.top,
            entropy_gradient=entropy_gradient,
            kept=kept,
        )

    columns: list[Sequence[Any]] = [each.split(chunk) for each in (hidden, tokens, temperature)]
    columns.append([None] * len(columns[0]) if kept is None else kept.split(chunk))
    if reference is not None:
        known = (reference.hidden, reference.ids)
        columns += [each.to(hidden.device).split(chunk) for each in known if each is not None]
    chunks = zip(*columns, strict=True)
    if recompute and torch.is_grad_enabled():
        parts = [checkpoint(score, *part, use_reentrant=False) for part in chunks]
    else:
        parts = [score(*part) for part in chunks]
    if len(parts) == 1:
        return parts[0]
    logprobs, entropy, kl = zip(*parts, strict=True)
    return DistributionScores(
        torch.cat(logprobs), torch.cat(entropy), None if reference is None else torch.cat(kl)
    )
