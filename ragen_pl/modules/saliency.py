"""Gradient saliency of the policy: how much each token and image patch matters for the actions that follow it.

The score of a position is `|e · d log p(actions) / d e|` with e its input embedding, a word's or an image patch's. To
first order it is the change of the log-probability if the embedding faded to zero (Shrikumar et al., 2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragen_pl.data.batch import Samples
from ragen_pl.models.inputs import DecoderInputs, embeddings_replaced, run_decoder
from ragen_pl.modules.forward import (
    LOGITS_MIB,
    sample_inputs,
    score_states,
    shared_images,
    tokens_per_chunk,
)
from ragen_pl.trajectory import Span

if TYPE_CHECKING:
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
