"""Decoder inputs: the only place that turns token ids and images into embeddings, positions and attention masks.

The rollout engine, scoring, saliency and occlusion all build their inputs and run the decoder here. What a model
family needs in addition to embeddings (rotary positions of several axes, masks by layer type, deepstack features)
belongs here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Cache

    from ragen_pl.models.attention import Level
    from ragen_pl.models.bundle import ModelBundle
    from ragen_pl.models.image_features import ImageFeatures

Mask = Tensor | dict[str, Tensor]


@dataclass(kw_only=True, slots=True)
class DecoderInputs:
    """Inputs of one decoder call. Row i of every tensor belongs to the same sequence."""

    ids: Tensor
    """int64 `[rows, time]`."""
    features: ImageFeatures | None = None
    """Features of the image tokens in `ids`, row after row; None without images."""
    positions: Tensor | None = None
    """int64 `[rows, time]`, or `[axes, rows, time]` for positions of several axes; None counts them from 0."""
    mask: Mask | None = None
    """bool `[rows, 1, time, slots]`, True where a position attends, or one for each type of layer.

    For models that keep states, bool `[rows, slots]`, False on padding. None leaves it to the model, for sequences
    without padding on the left.
    """
    bounds: Tensor | None = None
    """int32 `[sequences + 1]`, bounds of sequences that lie one after the other in one row; None for one a row."""
    longest: int = 0
    """Length of the longest of them."""
    levels: Sequence[Level] | None = None
    """Levels of sequences that lie in one row and share prefixes; None for none."""

    def rows(self, part: slice, *, image_token_id: int | None) -> DecoderInputs:
        """Return the inputs of some rows."""
        features = self.features
        if features is not None:
            slots = self.ids.eq(-1 if image_token_id is None else image_token_id).sum(1).cpu()
            ends = [0, *slots.cumsum(0).tolist()]
            features = features.between(ends[part.start], ends[part.stop])
        mask = self.mask
        if isinstance(mask, dict):
            mask = {kind: rows[part] for kind, rows in mask.items()}
        elif mask is not None:
            mask = mask[part]
        return DecoderInputs(
            ids=self.ids[part],
            features=features,
            positions=None if self.positions is None else self.positions[..., part, :],
            mask=mask,
        )


def run_decoder(
    bundle: ModelBundle,
    inputs: DecoderInputs,
    *,
    cache: Cache | None = None,
    first: int = 0,
    shared_slots: int = 0,
) -> Tensor:
    """Return the decoder's last hidden states, `[rows, time - first, hidden]`.

    The model's own forward places the image features, adds those of deeper layers and masks its layers.

    Args:
        bundle: Model.
        inputs: Inputs of this call.
        cache: Keys and values of earlier positions; those of this call are appended.
        first: First position whose state is read. Models with `ModelFacts.reads_end` compute no others.
        shared_slots: Number of the cache's first slots that hold the same in all rows.
    """
    if cache is not None and _continues_plainly(bundle, inputs, cache, first):
        assert bundle.token_pass is not None
        states = bundle.token_pass(bundle.decoder, inputs, cache=cache, shared_slots=shared_slots)
        return states[:, None]
    facts, features = bundle.facts, inputs.features
    arguments: dict[str, Any] = {"first_read": first} if facts.reads_end else {}
    if bundle.images is not None:
        arguments |= bundle.images.token_types(inputs.ids, shown=features is not None)
        if features is not None:
            arguments["mm_encoder_outputs"] = bundle.images.outputs(features)
    arguments[facts.cache_argument] = cache
    mask = _as_model_reads(inputs.mask, bundle)
    if inputs.bounds is not None:
        arguments |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), inputs.bounds)
        arguments |= dict.fromkeys(("max_length_q", "max_length_k"), inputs.longest)
    if inputs.levels is not None:
        arguments["levels"] = inputs.levels
    if inputs.bounds is not None or inputs.levels is not None:
        # given and not read, or the model would make one of time x time
        mask = inputs.ids.new_empty((1, 1, 0, 0), dtype=torch.bool)
    states = bundle.backbone(
        input_ids=inputs.ids,
        attention_mask=mask,
        position_ids=inputs.positions,
        use_cache=cache is not None,
        **arguments,
    ).last_hidden_state
    return states if facts.reads_end else states[:, first:]


def _continues_plainly(
    bundle: ModelBundle, inputs: DecoderInputs, cache: Cache, first: int
) -> bool:
    """Return whether the bundle's own pass gives the states: of the last new token, text, float32, no gradient."""
    layers: list[Any] = cache.layers
    return (
        bundle.token_pass is not None
        and first == inputs.ids.shape[1] - 1
        and not torch.is_grad_enabled()
        and inputs.positions is not None
        and (inputs.mask is not None or inputs.ids.shape[1] == 1)
        and inputs.features is None
        and bundle.facts.sliding_window is None
        and bool(layers)
        # in the first call it is not until the last part of the rows
        and layers[0].is_initialized
        # the earlier tokens were computed as these are
        and layers[0].keys.dtype == torch.float32
    )


def _as_model_reads(mask: Mask | None, bundle: ModelBundle) -> Mask | None:
    """Return a mask as the model's attention reads it: true and false, or a term of its scores."""
    if mask is None or not bundle.facts.additive_masks or bundle.facts.keeps_states:
        return mask
    dtype = bundle.model.dtype
    return _by_type(mask, lambda part: _additive(part, torch.finfo(dtype).min, dtype))


def added_to_scores(mask: Mask, bundle: ModelBundle, dtype: torch.dtype) -> Mask:
    """Return a mask as a term of the scores, where `sdpa` would make one in each layer; other masks as they are.

    Args:
        mask: Mask of `DecoderInputs`.
        bundle: Model.
        dtype: Type of the queries.
    """
    if bundle.facts.additive_masks or bundle.token_pass is not None:
        return mask
    return _by_type(mask, lambda part: _additive(part, -torch.inf, dtype))


def _by_type(mask: Mask, change: Callable[[Tensor], Tensor]) -> Mask:
    if isinstance(mask, dict):
        return {kind: change(part) for kind, part in mask.items()}
    return change(mask)


def _additive(mask: Tensor, masked: float, dtype: torch.dtype) -> Tensor:
    return torch.where(mask, 0.0, masked).to(dtype)


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """Features of some images of a batch."""

    features: ImageFeatures
    place: Tensor
    """int64 `[images]`, number in `features` of each image of the batch; any number for one that is not encoded."""


def encode_images(bundle: ModelBundle, images: Sequence[Tensor], numbers: Tensor) -> EncodedImages:
    """Encode images of a batch, each once.

    Args:
        bundle: Model.
        images: RGB images, each uint8 `[height, width, 3]`.
        numbers: int64 `[shown]`, indices into `images`; some may be equal.
    """
    assert bundle.images is not None
    used, index = torch.unique(numbers, return_inverse=True)
    features = bundle.images.encode([images[number].cpu().numpy() for number in used.tolist()])
    place = torch.zeros(len(images), dtype=torch.int64, device=numbers.device)
    return EncodedImages(features, place.index_put((numbers,), index))


def whole_inputs(
    bundle: ModelBundle,
    ids: Tensor,
    *,
    images: Sequence[Tensor] | EncodedImages,
    image_index: Tensor,
    patches: Tensor,
) -> DecoderInputs:
    """Build the inputs of whole sequences, padded on the right.

    A causal position does not attend to padding on its right, so no mask is needed.

    Args:
        bundle: Model.
        ids: int64 `[rows, time]`.
        images: RGB images, each uint8 `[height, width, 3]`, or their features.
        image_index: int64 `[rows, images]`, indices into `images`, -1 for none.
        patches: Bool `[rows, images, patches]`, the patches shown; `[rows, 0, 0]` if all are.
    """
    present = image_index >= 0
    shown_images = image_index[present]
    if not len(shown_images):
        return DecoderInputs(ids=ids)
    if not isinstance(images, EncodedImages):
        images = encode_images(bundle, images, shown_images)
    shown: list[np.ndarray | None] = [None] * len(shown_images)
    if patches.shape[-1]:
        shown = [row.nonzero().squeeze(-1).cpu().numpy() for row in patches[present]]
    features = images.features.select(images.place[shown_images].tolist(), shown)
    positions = None if bundle.facts.position_axes == 1 else _rope_positions(bundle, ids, features)
    return DecoderInputs(ids=ids, features=features, positions=positions)


def counted_positions(bundle: ModelBundle, ids: Tensor) -> Tensor:
    """Return positions counted from 0 in each row, int64 `[rows, time]` or `[axes, rows, time]`."""
    counted = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    axes = bundle.facts.position_axes
    return counted if axes == 1 else counted.expand(axes, *ids.shape)


def _rope_positions(
    bundle: ModelBundle, ids: Tensor, features: ImageFeatures | None, new: Tensor | None = None
) -> Tensor:
    """Return positions of several axes, such as time, height and width, int64 `[axes, rows, time]`, counted from 0.

    Args:
        bundle: Model.
        ids: int64 `[rows, time]`.
        features: Features of the image tokens; None without images.
        new: Bool `[rows, time]`, False on padding; None without padding on the left.
    """
    if features is None:
        counted = torch.ones_like(ids) if new is None else new.long()
        return (counted.cumsum(1) - 1).clamp_(min=0).expand(bundle.facts.position_axes, *ids.shape)
    assert bundle.images is not None
    known = bundle.images.token_types(ids, shown=True) | {
        str(bundle.facts.grid_argument): features.grids,
        "attention_mask": torch.ones_like(ids) if new is None else new.long(),
    }
    index: Callable[..., tuple[Tensor, Tensor]] = bundle.backbone.get_rope_index  # type: ignore[attr-defined]
    taken = bundle.facts.position_arguments
    positions, _ = index(ids, **{name: value for name, value in known.items() if name in taken})
    return positions


def continued_inputs(
    bundle: ModelBundle,
    new_ids: Sequence[np.ndarray],
    *,
    valid: Tensor,
    next_position: Tensor,
    features: ImageFeatures | None,
) -> tuple[DecoderInputs, Tensor, Tensor]:
    """Build the inputs of new ids that continue cached sequences.

    Args:
        bundle: Model.
        new_ids: New ids of each row, int64.
        valid: Bool `[rows, slots]`, the cache's slots that hold a token of the row.
        next_position: int64 `[rows]`, position of each row's first new id.
        features: Features of all image tokens in the new ids; None without images.

    Returns:
        The inputs, padded on the left to end in the same column; `valid` with the new slots, `[rows, slots + time]`;
        and the position after the last new id, int64 `[rows]`. It is not the number of ids where an image's positions
        have several axes.
    """
    width = max(len(ids) for ids in new_ids)
    padded = np.full((len(new_ids), width), bundle.pad_token_id, dtype=np.int64)
    is_new = np.zeros((len(new_ids), width), dtype=bool)
    for row, ids in enumerate(new_ids):
        padded[row, width - len(ids) :], is_new[row, width - len(ids) :] = ids, True
    new = torch.from_numpy(is_new).to(valid.device)
    inputs = DecoderInputs(ids=torch.from_numpy(padded).to(valid.device), features=features)
    if bundle.facts.position_axes == 1:
        inputs.positions = (next_position[:, None] + new.cumsum(1) - 1).clamp_(min=0)
        after_last = next_position + new.sum(1)
    else:
        positions = _rope_positions(bundle, inputs.ids, features, new) + next_position[:, None]
        inputs.positions = positions
        after_last = torch.where(new, positions.amax(0), -1).amax(1) + 1
    after = torch.cat([valid, new], dim=1)
    # the model's own rule is right for a first prefill without padding
    if valid.shape[1] > 0 or not bool(new.all()):
        inputs.mask = _masks(bundle, after, inputs.ids)
    return inputs, after, after_last


def token_inputs(
    bundle: ModelBundle, tokens: Tensor, *, positions: Tensor, valid: Tensor | None
) -> DecoderInputs:
    """Build the inputs of one sampled token for each cached sequence.

    Args:
        bundle: Model.
        tokens: int64 `[rows]`.
        positions: int64 `[rows]`.
        valid: Bool `[rows, slots]`, slots to attend to, the new one included; None for all.
    """
    at = positions[:, None]
    return DecoderInputs(
        ids=tokens[:, None],
        positions=at
        if bundle.facts.position_axes == 1
        else at.expand(bundle.facts.position_axes, *at.shape),
        mask=None if valid is None else _by_layer_type(bundle, valid[:, None, None, :], valid),
    )


def occluded_inputs(
    bundle: ModelBundle,
    ids: Tensor,
    *,
    features: ImageFeatures | None,
    kept: Sequence[np.ndarray],
) -> tuple[DecoderInputs, Tensor]:
    """Build the inputs of variants of a sequence that keep some of its positions.

    Args:
        bundle: Model whose positions are plain, see `ModelFacts.plain_positions`.
        ids: int64 `[time]`.
        features: Features of the sequence's image tokens; None without images.
        kept: Positions that each variant keeps, int64.

    Returns:
        The inputs, padded on the right; and the rows' lengths, int64 `[rows]`.
    """
    rows = ids.new_full((len(kept), len(ids)), bundle.pad_token_id)
    is_slot = ids.eq(-1 if bundle.image_token_id is None else bundle.image_token_id)
    number = is_slot.cumsum(0) - 1
    shown: list[np.ndarray] = []
    for row, places in enumerate(kept):
        at = torch.from_numpy(places).to(ids.device)
        rows[row, : len(places)] = ids[at]
        shown.append(number[at][is_slot[at]].cpu().numpy())
    lengths = torch.tensor([len(places) for places in kept], device=ids.device)
    if features is None:
        return DecoderInputs(ids=rows), lengths
    # the whole sequence's image tokens count as one image
    whole = replace(features, counts=(len(features.tokens),), grids=None)
    return DecoderInputs(ids=rows, features=whole.select([0] * len(kept), shown)), lengths


def shown_patches(
    bundle: ModelBundle, images: Sequence[np.ndarray], patches: Sequence[np.ndarray] | None
) -> list[np.ndarray]:
    """Return the indices of the patches that each image shows, all of them where `patches` is None."""
    if patches is not None:
        return list(patches)
    return [np.arange(bundle.num_image_tokens(image)) for image in images]


def _masks(bundle: ModelBundle, valid: Tensor, new_ids: Tensor) -> Mask:
    """Return the masks of new ids, whose slots are the last ones.

    A position attends to the valid slots before it, to its image, and to itself, which keeps padding finite.

    Args:
        bundle: Model.
        valid: Bool `[rows, slots]`.
        new_ids: int64 `[rows, new]`.
    """
    slots, new = valid.shape[1], new_ids.shape[1]
    query = torch.arange(slots - new, slots, device=valid.device)[:, None]
    key = torch.arange(slots, device=valid.device)[None, :]
    allowed = (valid[:, None, None, :] & (key <= query)) | (key == query)
    same_image = None
    if bundle.facts.bidirectional_layers:
        slot = new_ids.eq(bundle.facts.image_token_id or 0)
        # the number of tokens before that are no image: equal inside an image
        image = torch.where(slot, (~slot).cumsum(1), -1)
        same_image = torch.zeros_like(allowed)
        same = (image[:, :, None] == image[:, None, :]) & slot[:, :, None]
        same_image[:, 0, :, slots - new :] = same
    return _by_layer_type(bundle, allowed, valid, same_image)


def _by_layer_type(
    bundle: ModelBundle, allowed: Tensor, valid: Tensor, same_image: Tensor | None = None
) -> Mask:
    """Return a mask for each type of layer, or one for all.

    Args:
        bundle: Model.
        allowed: Bool `[rows, 1, new, slots]`, for full attention.
        valid: Bool `[rows, slots]`, slots that hold a token of the row.
        same_image: Bool `[rows, 1, new, slots]`, slots of the same image; None without images.
    """
    facts = bundle.facts
    types, window = facts.layer_types, facts.sliding_window
    if facts.keeps_states:
        # the model hides the padding from these layers itself
        return valid if facts.keeps_keys else valid[:, -allowed.shape[2] :]
    kinds = types or {"full_attention" if window is None else "sliding_attention"}
    masks = dict.fromkeys(kinds, allowed)
    if same_image is not None:
        both_ways = allowed | same_image
        masks |= dict.fromkeys(kinds & facts.bidirectional_layers, both_ways)
    if window is not None and "sliding_attention" in kinds:
        # a window counts tokens, not slots
        number = valid.cumsum(1)
        distance = number[:, -allowed.shape[2] :, None] - number[:, None, :]
        masks["sliding_attention"] = masks["sliding_attention"] & (distance < window)[:, None]
    return masks if types is not None else next(iter(masks.values()))
