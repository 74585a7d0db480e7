"""One forward pass over samples, computing only what the sampled tokens need.

Rows are bucketed by length, so that little is computed on padding; the decoder's head runs on the
positions that predict sampled tokens only; every image is encoded once a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ragen_pl.data.batch import Samples

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle

_LITTLE_PADDING = 0.05  # below this another part costs more than the padding it saves


@dataclass(slots=True)
class SampledStates:
    """Hidden states that predict sampled tokens, in one bucket of rows."""

    rows: Tensor  # int64 [tokens]: row in the samples
    columns: Tensor  # int64 [tokens]: position of the token that the state predicts
    hidden: Tensor  # [tokens, hidden]: the decoder's state at position column - 1


def split_by_length(lengths: Tensor, buckets: int) -> list[Tensor]:
    """Split rows into at most `buckets` parts of like length with the least padding in all.

    Dynamic programming over the distinct lengths: the cost of a part is its rows times its longest.
    Fewer parts are made where they leave little padding already.

    Examples:
        >>> [part.tolist() for part in split_by_length(torch.tensor([9, 2, 8, 2]), 2)]
        [[1, 3], [2, 0]]
    """
    order = torch.argsort(lengths, stable=True)
    unique, counts = np.unique(lengths.cpu().numpy(), return_counts=True)
    kinds, most = len(unique), min(buckets, len(unique))
    before = np.concatenate([[0], np.cumsum(counts)])
    cost = np.full((most + 1, kinds + 1), np.inf)
    cost[0, 0] = 0
    cut = np.zeros((most + 1, kinds + 1), dtype=np.int64)
    for part in range(1, most + 1):
        for end in range(1, kinds + 1):
            totals = cost[part - 1, :end] + (before[end] - before[:end]) * unique[end - 1]
            cut[part, end] = int(totals.argmin())
            cost[part, end] = totals[cut[part, end]]
    little = cost[:, kinds] * (1.0 - _LITTLE_PADDING) <= int(lengths.sum())
    parts, end = [], kinds
    for part in range(int(little.argmax()) or most, 0, -1):
        start = int(cut[part, end])
        parts.append(order[int(before[start]) : int(before[end])])
        end = start
    return [part for part in reversed(parts) if len(part)]


def decoder_parts(lengths: Tensor, tokens: int) -> list[Tensor]:
    """Split rows, shortest first, into parts of at most `tokens` positions, padding included."""
    order = torch.argsort(lengths, stable=True)
    parts, start = [], 0
    longest = lengths[order].tolist()
    for end in range(1, len(order) + 1):
        full = end < len(order) and (end - start + 1) * longest[end] > tokens
        if full or end == len(order):
            parts.append(order[start:end])
            start = end
    return parts


def padding_share(lengths: Tensor, parts: list[Tensor]) -> float:
    """Return the share of computed positions that are padding."""
    computed = sum(len(part) * int(lengths[part].max()) for part in parts)
    return 1.0 - float(lengths.sum()) / computed


def sampled_states(
    bundle: ModelBundle, samples: Samples, pixel_values: Tensor, parts: list[Tensor]
) -> Iterator[SampledStates]:
    """Run the decoder on each part of the rows and yield the states that predict sampled tokens.

    V(s_t) and the distribution of token t are both read at position t - 1; the shift is made here, once.
    """
    for part in parts:
        hidden = decoder_states(bundle, samples, pixel_values, part)
        sampled = samples.turn[part, : hidden.shape[1]] >= 0
        at, columns = sampled.nonzero(as_tuple=True)
        yield SampledStates(part.to(at.device)[at], columns, hidden[at, columns - 1])


def decoder_states(
    bundle: ModelBundle, samples: Samples, pixel_values: Tensor, rows: Tensor
) -> Tensor:
    """Return the decoder's last hidden states `[rows, time, hidden]` of these rows.

    Padding stands on the right, where a causal decoder can't see it, so no mask is needed.
    """
    embeds = embedded(bundle, samples, pixel_values, rows)
    return bundle.decoder(inputs_embeds=embeds, use_cache=False).last_hidden_state


def embedded(bundle: ModelBundle, samples: Samples, pixel_values: Tensor, rows: Tensor) -> Tensor:
    """Return the decoder's inputs `[rows, time, hidden]`: words' embeddings, and features in the image slots."""
    time = int(samples.length[rows].max())
    ids = samples.input_ids[rows, :time]
    images = samples.images[rows]
    images = images[images >= 0]
    if not len(images):
        return bundle.embed(ids)
    used, index = torch.unique(images, return_inverse=True)
    features = bundle.features(pixel_values[used])[index]
    if samples.patches.shape[-1]:
        shown = features[samples.patches[rows][samples.images[rows] >= 0]]
    else:
        shown = features.flatten(0, 1)
    return bundle.embed(ids, shown)
