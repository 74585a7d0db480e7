"""Rows of a forward pass one after the other, without padding.

Positions count from 0 in each row and attention stays inside it, by its bounds (`ragen_pl.models.attention`). Results
are those of padded rows up to the order of additions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragen_pl.models.attention import PACKED_ROWS, pack_rows, runs_kernels
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.inputs import DecoderInputs, counted_positions, run_decoder


def can_pack(bundle: ModelBundle) -> bool:
    """Return whether bounds say all that a model's layers need to know of rows.

    Sliding windows, states that run on, images read both ways and `eager` are left to padded rows, and so are decoders
    that take no further arguments.
    """
    facts, text = bundle.facts, bundle.model.config.get_text_config()
    return (
        facts.reads_all_before
        and facts.hands_on
        and not facts.reads_end
        and text._attn_implementation in ("sdpa", PACKED_ROWS)
    )


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


@torch.no_grad()
def _keeps_apart(bundle: ModelBundle, device: torch.device) -> bool:
    """Return whether the states of a row stay the same, to the bit, if the row before it changes."""
    used = torch.tensor([each for each in bundle.token_ids if each not in bundle.special_tokens])
    row = used[torch.arange(6) % len(used)]
    lengths = torch.tensor([6, 6], device=device)
    states = [
        packed_states(bundle, DecoderInputs(ids=torch.stack([before, row]).to(device)), lengths)
        for before in (row, row.flip(0))
    ]
    same, changed = (
        torch.equal(states[0][part], states[1][part]) for part in (slice(6, None), slice(6))
    )
    return same and not changed
