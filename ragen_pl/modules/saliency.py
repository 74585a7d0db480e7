"""Gradient saliency of the policy: how much each token and image patch matters for the actions that follow it.

The score of a position is `|e · d log p(actions) / d e|` with e its input embedding, a word's or an image patch's. To
first order it is the change of the log-probability if the embedding faded to zero (Shrikumar et al., 2017). Masks that
go by it (`masking.Importance`) are narrowed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragen_pl.algorithms.masks import top_in_turn
from ragen_pl.data.batch import CreditLayout, Samples, TrajectoryBatch
from ragen_pl.models.inputs import DecoderInputs, run_decoder
from ragen_pl.modules.forward import (
    LOGITS_MIB,
    sample_inputs,
    score_states,
    shared_images,
    tokens_per_chunk,
)
from ragen_pl.modules.masking import Importance, TokenMasks
from ragen_pl.trajectory import SAMPLED_SPANS, Span

if TYPE_CHECKING:
    from ragen_pl.metrics.importance import ImportanceStatistics
    from ragen_pl.models.bundle import ModelBundle


@dataclass(frozen=True, slots=True)
class SaliencyReadout:
    """Scores every position by its effect on the actions that follow it in its row.

    Attributes:
        logits_mib: MiB of float32 logits that the head computes at a time.
    """

    logits_mib: float = LOGITS_MIB

    def __call__(
        self,
        bundle: ModelBundle,
        samples: Samples,
        images: Sequence[Tensor],
        microbatches: Sequence[Tensor],
    ) -> Tensor:
        """Return float32 `[rows, time]`, words and image slots alike; 0 on padding and after the last action."""
        scores = torch.zeros(samples.input_ids.shape, device=samples.input_ids.device)
        with torch.no_grad():
            shared = shared_images(bundle, samples, images, microbatches)
        for rows in microbatches:
            with torch.no_grad():
                inputs = sample_inputs(bundle, samples, shared, rows)
            effect = _effect_on_actions(
                bundle, samples, inputs, rows, chunk=tokens_per_chunk(bundle, self.logits_mib)
            )
            time = torch.arange(effect.shape[1], device=effect.device)
            inside = time[None, :] < samples.length[rows][:, None].to(effect.device)
            scores[rows, : effect.shape[1]] = torch.where(inside, effect, 0.0)
        return scores


def _effect_on_actions(
    bundle: ModelBundle, samples: Samples, inputs: DecoderInputs, rows: Tensor, *, chunk: int
) -> Tensor:
    """Return each position's effect on the action tokens of these rows, float32 `[rows, time]`.

    Rows without an action are computed too: all ranks have to run as many forward passes.
    """
    actions = (samples.turn[rows] >= 0) & (samples.spans[rows] == Span.ACTION)
    at, columns = actions[:, : inputs.ids.shape[1]].nonzero(as_tuple=True)
    place = (rows.to(at.device)[at], columns)
    return gradient_times_input(
        bundle,
        inputs,
        rows=at,
        columns=columns,
        tokens=samples.input_ids[place],
        temperature=samples.temperature[place],
        chunk=chunk,
    )


def gradient_times_input(
    bundle: ModelBundle,
    inputs: DecoderInputs,
    *,
    rows: Tensor,
    columns: Tensor,
    tokens: Tensor,
    temperature: Tensor,
    chunk: int,
) -> Tensor:
    """Return every position's effect on some tokens, float32 `[rows, time]`. The weights get no gradient.

    Args:
        bundle: Model.
        inputs: Decoder inputs, padded on the right; no inference tensors.
        rows: int64 `[tokens]`.
        columns: int64 `[tokens]`, positions from 1 on.
        tokens: int64 `[tokens]`, ids at these places.
        temperature: Temperature of their distributions, `[tokens]`.
        chunk: Number of tokens whose logits are computed at a time.
    """
    entering: list[Tensor] = []

    def as_leaf(embeds: Tensor) -> Tensor:
        entering.append(embeds.detach().requires_grad_(True))
        return entering[-1]

    with torch.enable_grad(), embeddings_replaced(bundle, as_leaf):
        states = run_decoder(bundle, inputs)
        scores = score_states(
            bundle,
            states[rows, columns - 1],
            tokens,
            temperature=temperature,
            chunk=chunk,
            recompute=len(tokens) > chunk,
        )
        (embeds,) = entering
        (gradient,) = torch.autograd.grad(scores.logprobs.sum(), embeds)
    return (gradient * embeds.detach()).sum(-1).abs().float()


def keep_important(
    masks: TokenMasks,
    scores: Tensor,
    batch: TrajectoryBatch,
    layout: CreditLayout,
    *,
    keep: Importance,
) -> None:
    """Narrow M_loss and M_adv to actions and the tokens that matter most for them.

    Args:
        masks: Changed in place.
        scores: Saliency, `[rows, time]`.
        batch: Trajectories with spans.
        layout: Credit layout of the batch.
        keep: Fractions of the tokens to keep.
    """
    turn, score = layout.turn, layout.gather(scores)
    action = layout.gather(batch.samples.spans) == Span.ACTION
    turns = batch.episodes.turn_rewards.shape[1]
    actions = torch.zeros(len(action), turns + 1, device=action.device)
    has_action = actions.scatter_add(1, turn + 1, action.float()).gather(1, turn + 1) > 0

    def narrowed(mask: Tensor, fraction: float) -> Tensor:
        selected = top_in_turn(score, mask & ~action, turn, fraction=fraction)
        return mask & torch.where(has_action, selected | action, True)

    masks.advantage = narrowed(masks.advantage, keep.advantage)
    masks.narrow_loss(narrowed(masks.loss, keep.loss))


def record_importance(
    statistics: ImportanceStatistics,
    samples: Samples,
    scores: Tensor,
    *,
    before: Tensor,
    after: Tensor,
    image_token: int | None,
) -> None:
    """Add the scores and the narrowing of M_loss to the statistics, by kind of token.

    Args:
        statistics: Changed in place.
        samples: Samples that were scored.
        scores: Saliency, `[rows, time]`.
        before: M_loss before the narrowing, bool `[rows, time]`.
        after: M_loss after the narrowing, bool `[rows, time]`.
        image_token: Id of an image slot, None for a text model.
    """
    place = torch.arange(samples.turn.shape[1], device=samples.turn.device)
    is_padding = place >= samples.length[:, None]
    prompt = (samples.turn < 0) & ~is_padding & (samples.weight > 0)[:, None]
    image = prompt & (samples.input_ids == (-1 if image_token is None else image_token))
    statistics.add("image", scores, image)
    statistics.add("text", scores, prompt & ~image)
    for span in SAMPLED_SPANS:
        of_span = samples.sampled & (samples.spans == span)
        statistics.add(span.name.lower(), scores, of_span, before=before, after=after)


@contextmanager
def embeddings_replaced(bundle: ModelBundle, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Run the decoder on changed input embeddings.

    Args:
        bundle: Model.
        change: Returns the embeddings that enter the first layer instead of those given, `[rows, time, hidden]`.
    """

    def replace(layer: object, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (change(arguments[0]), *arguments[1:])

    handle = bundle.first_layer.register_forward_pre_hook(replace)
    try:
        yield
    finally:
        handle.remove()
