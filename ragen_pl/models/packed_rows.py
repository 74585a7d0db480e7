"""Rows of a forward pass one after the other, without padding.

Positions count from 0 in each row and attention stays inside it, by its bounds (`ragen_pl.models.attention`). Results
are those of padded rows up to the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ragen_pl.models.attention import PACKED_ROWS, LayoutError, pack_rows, runs_kernels
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.inputs import DecoderInputs, counted_positions, run_decoder


def hands_layout_on(bundle: ModelBundle) -> bool:
    """Return whether a model's attention takes the layout of sequences in one row, and needs nothing else.

    Sliding windows, states that run on, images read both ways and `eager` are left to rows of their own, and so are
    decoders that take no further arguments.
    """
    facts, text = bundle.facts, bundle.model.config.get_text_config()
    return (
        facts.reads_all_before
        and facts.hands_on
        and text._attn_implementation in ("sdpa", PACKED_ROWS)
    )


def can_pack(bundle: ModelBundle) -> bool:
    """Return whether bounds say all that a model's layers need to know of rows, of which all states are computed."""
    return hands_layout_on(bundle) and not bundle.facts.reads_end


def packs(bundle: ModelBundle, device: torch.device) -> bool:
    """Return whether whole sequences on a device are computed without padding; see `ModelBundle.packs_rows`.

    Raises:
        ValueError: They are to be, and the model's layers mix packed rows.
    """
    wanted = bundle.packs_rows
    if wanted is None:
        wanted = runs_kernels(device, bundle.model.dtype)
    if not wanted or not can_pack(bundle):
        return False
    pack_rows(bundle.model.config.get_text_config())
    if bundle.keeps_rows_apart is None:
        bundle.keeps_rows_apart = _keeps_apart(bundle, device)
    if bundle.packs_rows and not bundle.keeps_rows_apart:
        raise ValueError(
            f"update.packed=true: the layers of {bundle.facts.family} mix rows that lie one after the other; set false"
        )
    return bundle.keeps_rows_apart


def packed_states(bundle: ModelBundle, inputs: DecoderInputs, lengths: Tensor) -> Tensor:
    """Return the decoder's last hidden states of whole sequences, one after the other, `[tokens, hidden]`.

    Args:
        bundle: Model.
        inputs: Whole sequences, padded on the right, without a mask.
        lengths: int64 `[rows]`, their lengths.
    """
    ids, positions = inputs.ids, inputs.positions
    if positions is None:
        positions = counted_positions(bundle, ids)
    kept = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    packed = DecoderInputs(
        ids=ids[kept][None],
        features=inputs.features,
        positions=positions[..., kept][..., None, :],
        bounds=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        longest=ids.shape[1],
    )
    return run_decoder(bundle, packed)[0]


def agree_with_rows(
    bundle: ModelBundle, device: torch.device, states: Callable[[Tensor], Tensor]
) -> bool:
    """Return whether states of rows that lie in one row are those of rows of their own, up to rounding.

    Two short rows are compared, which begin alike. Layers that mix them, or count positions anew, differ by far more.

    Args:
        bundle: Model.
        device: Its device.
        states: Returns the states of ids `[2, 6]`, `[2, 6, hidden]`.
    """
    used = torch.tensor([each for each in bundle.token_ids if each not in bundle.special_tokens])
    row = used[torch.arange(9) % len(used)].to(device)
    ids = torch.stack([row[:6], torch.cat([row[:3], row[6:]])])
    with torch.no_grad():
        expected = run_decoder(bundle, DecoderInputs(ids=ids)).float()
        try:
            difference = states(ids).float() - expected
        except LayoutError:
            return False
    rounds = torch.is_autocast_enabled(device.type) or bundle.model.dtype != torch.float32
    return bool(difference.norm() < (0.05 if rounds else 1e-4) * expected.norm())


def _keeps_apart(bundle: ModelBundle, device: torch.device) -> bool:
    lengths = torch.tensor([6, 6], device=device)

    def states(ids: Tensor) -> Tensor:
        return packed_states(bundle, DecoderInputs(ids=ids), lengths).unflatten(0, (2, 6))

    return agree_with_rows(bundle, device, states)
