"""Decoder inputs: the only place that turns token ids and images into embeddings, positions and attention masks.

The rollout engine, scoring, saliency and occlusion all build their inputs and run the decoder here. What a model
family needs in addition to embeddings (rotary positions of several axes, masks by layer type, deepstack features)
belongs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Cache

    from ragen_pl.models.bundle import ModelBundle


@dataclass(kw_only=True, slots=True)
class DecoderInputs:
    """Inputs of one decoder call. Row i of every tensor belongs to the same sequence."""

    embeds: Tensor
    """`[rows, time, hidden]`."""
    positions: Tensor | None = None
    """int64 `[rows, time]`; None counts them from 0."""
    mask: Tensor | None = None
    """bool `[rows, 1, time, slots]`, True where a position attends; None for plain causal attention."""


def run_decoder(
    bundle: ModelBundle, inputs: DecoderInputs, *, cache: Cache | None = None
) -> Tensor:
    """Return the decoder's last hidden states, `[rows, time, hidden]`.

    Args:
        bundle: Model.
        inputs: Inputs of this call.
        cache: Keys and values of earlier positions; those of this call are appended.
    """
    mask = inputs.mask
    if mask is not None and bundle.facts.additive_masks:
        dtype = inputs.embeds.dtype
        mask = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)
    states: Tensor = bundle.decoder(
        inputs_embeds=inputs.embeds,
        attention_mask=mask,
        position_ids=inputs.positions,
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state
    return states


def whole_inputs(
    bundle: ModelBundle,
    ids: Tensor,
    *,
    pixel_values: Tensor,
    image_index: Tensor,
    patches: Tensor,
) -> DecoderInputs:
    """Build the inputs of whole sequences, padded on the right.

    A causal position does not attend to padding on its right, so no mask is needed.

    Args:
        bundle: Model.
        ids: int64 `[rows, time]`.
        pixel_values: Images as `ModelBundle.pixel_values` returns them.
        image_index: int64 `[rows, images]`, indices into `pixel_values`, -1 for none.
        patches: bool `[rows, images, patches]`, the patches shown; `[rows, 0, 0]` if all are.
    """
    present = image_index >= 0
    images = image_index[present]
    if not len(images):
        return DecoderInputs(embeds=bundle.embed(ids))
    used, index = torch.unique(images, return_inverse=True)
    features = bundle.features(pixel_values[used])[index]
    shown = features[patches[present]] if patches.shape[-1] else features.flatten(0, 1)
    return DecoderInputs(embeds=bundle.embed(ids, shown))


def continued_inputs(
    bundle: ModelBundle,
    new_ids: Sequence[np.ndarray],
    *,
    valid: Tensor,
    next_position: Tensor,
    features: Tensor | None,
) -> tuple[DecoderInputs, Tensor]:
    """Build the inputs of new ids that continue cached sequences.

    Args:
        bundle: Model.
        new_ids: New ids of each row, int64.
        valid: bool `[rows, slots]`, the cache's slots that hold a token of the row.
        next_position: int64 `[rows]`, position of each row's first new id.
        features: `[image tokens, hidden]`, features of all image tokens in the new ids; None without images.

    Returns:
        The inputs, padded on the left to end in the same column, and `valid` with the new slots,
        `[rows, slots + time]`.
    """
    width = max(len(ids) for ids in new_ids)
    padded = np.full((len(new_ids), width), bundle.pad_token_id, dtype=np.int64)
    is_new = np.zeros((len(new_ids), width), dtype=bool)
    for row, ids in enumerate(new_ids):
        padded[row, width - len(ids) :], is_new[row, width - len(ids) :] = ids, True
    new = torch.from_numpy(is_new).to(valid.device)
    inputs = DecoderInputs(
        embeds=bundle.embed(torch.from_numpy(padded).to(valid.device), features),
        positions=(next_position[:, None] + new.cumsum(1) - 1).clamp_(min=0),
    )
    after = torch.cat([valid, new], dim=1)
    # the decoder's own causal rule is right for a first prefill without padding
    if valid.shape[1] > 0 or not bool(new.all()):
        inputs.mask = _causal_mask(after, width)
    return inputs, after


def token_inputs(
    bundle: ModelBundle, tokens: Tensor, *, positions: Tensor, valid: Tensor | None
) -> DecoderInputs:
    """Build the inputs of one sampled token for each cached sequence.

    Args:
        bundle: Model.
        tokens: int64 `[rows]`.
        positions: int64 `[rows]`.
        valid: bool `[rows, slots]`, slots to attend to, the new one included; None for all.
    """
    mask = None if valid is None else valid[:, None, None, :]
    return DecoderInputs(
        embeds=bundle.embed(tokens[:, None]), positions=positions[:, None], mask=mask
    )


def occluded_inputs(
    bundle: ModelBundle,
    ids: Tensor,
    *,
    features: Tensor | None,
    occlusions: Sequence[np.ndarray],
) -> tuple[DecoderInputs, Tensor]:
    """Build the inputs of a sequence and of its variants without some positions.

    Args:
        bundle: Model.
        ids: int64 `[time]`.
        features: `[image tokens, hidden]`; None without images.
        occlusions: Positions that each variant leaves out, int64.

    Returns:
        The inputs, the whole sequence first, padded on the right; and the rows' lengths, int64 `[rows]`.
    """
    embeds = bundle.embed(ids, features)
    positions = np.arange(len(embeds))
    kept = [positions, *(np.delete(positions, left_out) for left_out in occlusions)]
    rows = embeds.new_zeros(len(kept), *embeds.shape)
    for row, places in enumerate(kept):
        rows[row, : len(places)] = embeds[torch.from_numpy(places).to(embeds.device)]
    lengths = torch.tensor([len(places) for places in kept], device=embeds.device)
    return DecoderInputs(embeds=rows), lengths


def shown_patches(
    bundle: ModelBundle, images: Sequence[np.ndarray], patches: Sequence[np.ndarray] | None
) -> list[np.ndarray]:
    """Return the indices of the patches that each image shows, all of them where `patches` is None."""
    if patches is not None:
        return list(patches)
    return [np.arange(bundle.num_image_tokens(image)) for image in images]


def shown_features(features: Sequence[Tensor], patches: Sequence[np.ndarray]) -> Tensor:
    """Return the features of the patches shown, `[image tokens, hidden]`.

    Args:
        features: Features of each image, `[patches, hidden]`.
        patches: Indices of the patches that each image shows, int64.
    """
    return torch.cat(
        [
            whole if len(shown) == len(whole) else whole[torch.from_numpy(shown).to(whole.device)]
            for whole, shown in zip(features, patches, strict=True)
        ]
    )


def _causal_mask(valid: Tensor, new: int) -> Tensor:
    """Return bool `[rows, 1, new, slots]`: valid earlier slots, and the slot itself to keep padding finite."""
    slots = valid.shape[1]
    query = torch.arange(slots - new, slots, device=valid.device)[:, None]
    key = torch.arange(slots, device=valid.device)[None, :]
    return (valid[:, None, None, :] & (key <= query)) | (key == query)
