"""The prefix that all rows of a forward pass begin with, computed once.

Samples begin with the same text where a system prompt holds the rules. Its keys and values are those of one row, which
all rows attend to, and their gradients add up. Results are those of whole rows up to the order of additions. Prefix
Grouper (Liu et al. 2025, https://arxiv.org/abs/2506.05433) does so for the prompt of a group.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache

from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.inputs import DecoderInputs, counted_positions, run_decoder

# positions that are worth the second pass, whose kernels a GPU has to launch
_SAVED_ON_CPU, _SAVED = 256, 4096
# of a row's positions: attention with a mask takes about a tenth of the pass longer
_LEAST_FRACTION = 0.2


def states_of_rows(bundle: ModelBundle, inputs: DecoderInputs, *, first: int) -> Tensor:
    """Return the decoder's last hidden states of whole sequences, `[rows, time - first, hidden]`.

    Args:
        bundle: Model.
        inputs: Whole sequences, padded on the right, without a mask.
        first: First position whose state is read.
    """
    ids, positions = inputs.ids, inputs.positions
    shared = shared_positions(bundle, ids, first=first)
    if not shared:
        return run_decoder(bundle, inputs, first=first)
    if positions is None:
        positions = counted_positions(bundle, ids)
    cache = DynamicCache()
    prefix = DecoderInputs(ids=ids[:1, :shared], positions=positions[..., :1, :shared])
    run_decoder(bundle, prefix, cache=cache, first=shared - 1)
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.keys = layer.keys.expand(len(ids), -1, -1, -1)
        layer.values = layer.values.expand(len(ids), -1, -1, -1)
    rest = DecoderInputs(
        ids=ids[:, shared:], features=inputs.features, positions=positions[..., shared:]
    )
    return run_decoder(bundle, rest, cache=cache, first=first - shared)


def shared_positions(bundle: ModelBundle, ids: Tensor, *, first: int) -> int:
    """Return the number of positions of whole sequences that are computed once, 0 for none.

    Args:
        bundle: Model.
        ids: int64 `[rows, time]`.
        first: First position whose state is read.
    """
    shared = _shared_length(bundle, ids[:, :first]) if _can_share(bundle) else 0
    return shared if _is_worth(shared, ids) else 0


def _shared_length(bundle: ModelBundle, ids: Tensor) -> int:
    """Return the number of tokens that all rows begin with, before the first image and the token that begins it."""
    alike = (ids == ids[0]).all(0)
    if bundle.image_token_id is not None:
        if bundle.facts.token_begins_image:
            alike[:-1] &= ids[0, 1:] != bundle.image_token_id
        alike &= ids[0] != bundle.image_token_id
    return int(alike.long().cumprod(0).sum())


def _is_worth(shared: int, ids: Tensor) -> bool:
    """Return whether a pass of its own over the first `shared` tokens saves time."""
    rows, time = ids.shape
    least = _SAVED_ON_CPU if ids.device.type == "cpu" else _SAVED
    return (rows - 1) * shared >= least and shared >= _LEAST_FRACTION * time


def _can_share(bundle: ModelBundle) -> bool:
    """Return whether layers read nothing of earlier tokens but keys and values, those of all, and may share them."""
    return bundle.shares_prefix and bundle.facts.reads_all_before and not bundle.checkpoints_layers
