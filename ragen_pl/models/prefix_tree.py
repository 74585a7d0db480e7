"""Rows of a forward pass as a tree: what several of them begin with is computed once.

Members of a group begin with the same prompt, samples of an episode with the same turns, all with the same system
prompt. Rows are cut at common columns. Between two cuts each distinct prefix is computed once, with its images, and
rows that have ended are left out. Positions are those of whole rows, attention reads the keys and values of a prefix
for each of its continuations (`ragen_pl.models.attention.Level`), and their gradients add up. Results are those of
whole rows up to the order of additions. Prefix Grouper (Liu et al. 2025, https://arxiv.org/abs/2506.05433) computes the
prompt of a group once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ragen_pl.models.attention import Level, pack_rows
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.dropout import has_dropout
from ragen_pl.models.inputs import DecoderInputs, counted_positions, run_decoder
from ragen_pl.models.packed_rows import agree_with_rows, hands_layout_on

# positions that are worth another level, whose kernels a GPU has to launch
_WORTH_ON_CPU, _WORTH = 256, 4096
# of a position's time: a copy of its keys and values
_COPY = 1 / 32
# of a pass: what attention with masks takes longer
_LEAST_FRACTION = 0.15


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Where the tokens of rows lie in one row of levels."""

    levels: Sequence[Level]
    source: Tensor
    """int64 `[positions]`, place in the flattened rows `[rows * time]` of each position."""
    place: Tensor
    """int64 `[rows, time]`, position of each token; none of its own, or -1, on padding."""
    first: int
    """First position of the first level whose states are read."""


def can_share(bundle: ModelBundle) -> bool:
    """Return whether passes may compute prefixes once: layers read keys and values of all earlier tokens alone."""
    return bundle.shares_prefix and hands_layout_on(bundle)


def tree_of_rows(
    bundle: ModelBundle, inputs: DecoderInputs, lengths: Tensor, *, first: int, otherwise: int
) -> PrefixTree | None:
    """Return the tree of whole sequences, None where it saves too little or the model's layers mix its parts.

    Args:
        bundle: Model that `can_share`.
        inputs: Whole sequences, padded on the right, without a mask.
        lengths: int64 `[rows]`, their lengths.
        first: First position whose state is read.
        otherwise: Positions that are computed without a tree.
    """
    if len(lengths) < 2:
        return None
    device, time = inputs.ids.device, inputs.ids.shape[1]
    least = _WORTH_ON_CPU if device.type == "cpu" else _WORTH
    rows = SortedRows.of(_keys(bundle, inputs, lengths), lengths.cpu().numpy())
    forced = (first,) if bundle.facts.reads_end and 0 < first < time else ()
    cuts = rows.cuts(least=least, forced=forced)
    saved = otherwise - rows.positions(cuts)
    if saved < max(least, _LEAST_FRACTION * otherwise):
        return None
    if bundle.keeps_parts_apart is None:
        pack_rows(bundle.model.config.get_text_config())
        # of a shared prefix dropout would be drawn once for all rows
        bundle.keeps_parts_apart = not has_dropout(bundle.model) and _keeps_apart(bundle, device)
    return rows.tree(cuts, first=first, device=device) if bundle.keeps_parts_apart else None


def tree_states(bundle: ModelBundle, inputs: DecoderInputs, tree: PrefixTree) -> Tensor:
    """Return the decoder's last hidden states of the tree's positions from `tree.first` on, `[positions, hidden]`.

    Args:
        bundle: Model.
        inputs: Whole sequences, padded on the right, without a mask.
        tree: Their tree.
    """
    ids, positions, features, source = inputs.ids, inputs.positions, inputs.features, tree.source
    if positions is None:
        positions = counted_positions(bundle, ids)
    if features is not None:
        slot = ids.eq(-1 if bundle.image_token_id is None else bundle.image_token_id).flatten()
        number = (slot.cumsum(0) - 1)[source][slot[source]].cpu().numpy()
        # a cut may lie inside an image: all of them count as one
        one = replace(features, counts=(len(features.tokens),), grids=None)
        features = one.select([0], [number])
    packed = DecoderInputs(
        ids=ids.flatten()[source][None],
        features=features,
        positions=positions.flatten(-2)[..., source][..., None, :],
        levels=tree.levels,
    )
    return run_decoder(bundle, packed, first=tree.first)[0]


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in an order in which those that begin alike are neighbors."""

    order: np.ndarray
    """int64 `[rows]`, number of each row."""
    lengths: np.ndarray
    """int64 `[rows]`, in this order."""
    alike: np.ndarray
    """int64 `[rows]`, tokens that a row has in common with the row before it: `time` of equal rows, -1 of the first."""
    time: int

    @classmethod
    def of(cls, keys: np.ndarray, lengths: np.ndarray) -> SortedRows:
        """Sort rows.

        Args:
            keys: int64 `[rows, time, parts]`, what tokens are compared by, -1 on padding.
            lengths: int64 `[rows]`.
        """
        order = np.array(sorted(range(len(keys)), key=[row.tobytes() for row in keys].__getitem__))
        same = (keys[order[1:]] == keys[order[:-1]]).all(2)
        alike = np.concatenate([[-1], np.logical_and.accumulate(same, axis=1).sum(1)])
        return cls(order, lengths[order], alike, keys.shape[1])

    def cuts(self, *, least: int, forced: Sequence[int] = ()) -> list[int]:
        """Return the columns of the cuts, the ends included, by which fewest positions are computed.

        Args:
            least: Positions that another level has to save.
            forced: Columns with a cut in any case.
        """
        columns = np.unique([0, self.time, *forced, *self.alike[1:], *self.lengths])
        starts = columns[:, None]
        # of a level between any two columns
        cost = self._parts(starts, columns) * (columns - starts + _COPY * starts) + least
        best, previous = np.zeros(len(columns)), np.zeros(len(columns), dtype=np.int64)
        earliest = 0
        for end in range(1, len(columns)):
            totals = best[earliest:end] + cost[earliest:end, end]
            previous[end] = earliest + totals.argmin()
            best[end] = totals.min()
            if columns[end] in forced:
                earliest = end
        cuts, end = [], len(columns) - 1
        while end:
            cuts.append(int(columns[end]))
            end = int(previous[end])
        return [0, *reversed(cuts)]

    def positions(self, cuts: Sequence[int]) -> int:
        """Return the number of positions of the tree with these cuts."""
        starts, ends = np.array(cuts[:-1]), np.array(cuts[1:])
        return int(((ends - starts) * self._parts(starts, ends)).sum())

    def tree(self, cuts: Sequence[int], *, first: int, device: torch.device) -> PrefixTree:
        """Return the tree with these cuts; `first` is the first column whose states are read."""
        place = np.full((len(self.order), self.time), -1)
        part = np.zeros(len(self.order), dtype=np.int64)
        levels, sources = [], []
        positions = read = 0
        for start, end in pairwise(cuts):
            goes_on, width = self.lengths > start, end - start
            begins = goes_on & (self.alike < end)
            source = self.order[begins][:, None] * self.time + np.arange(start, end)
            continued = mask = None
            if start:
                continued = torch.from_numpy(part[begins]).to(device)
                mask = torch.ones(1, 1, width, end, dtype=torch.bool, device=device).tril(start)
            part = begins.cumsum() - 1
            inside = positions + part[goes_on, None] * width + np.arange(width)
            place[self.order[goes_on], start:end] = inside
            if start <= first:
                read = positions
            positions += source.size
            sources.append(source.ravel())
            levels.append(Level(len(source), width, continued, mask))
        return PrefixTree(
            levels,
            source=torch.from_numpy(np.concatenate(sources)).to(device),
            place=torch.from_numpy(place).to(device),
            first=read,
        )

    def _parts(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the number of distinct prefixes up to `end` of the rows that are longer than `start`."""
        ended = np.sort(self.lengths[self.alike < self.time])
        distinct = np.sort(self.alike).searchsorted(end)
        return distinct - ended.searchsorted(start, side="right")


def _keys(bundle: ModelBundle, inputs: DecoderInputs, lengths: Tensor) -> np.ndarray:
    """Return the keys by which tokens of rows are compared, int64 `[rows, time, parts]`: ids, images and positions."""
    ids = inputs.ids
    keys = ids
    if inputs.features is not None:
        assert inputs.features.origin is not None
        slot = ids.eq(-1 if bundle.image_token_id is None else bundle.image_token_id)
        # other numbers than ids and padding have
        keys = ids.masked_scatter(slot, -2 - inputs.features.origin)
    padding = torch.arange(ids.shape[1], device=ids.device) >= lengths[:, None].to(ids.device)
    parts = [keys.masked_fill(padding, -1)]
    if inputs.positions is not None:
        positions = inputs.positions.reshape(-1, *ids.shape)
        parts += positions.masked_fill(padding, -1)
    return torch.stack(parts, dim=2).cpu().numpy()


def _keeps_apart(bundle: ModelBundle, device: torch.device) -> bool:
    rows = SortedRows(np.arange(2), np.array([6, 6]), np.array([-1, 3]), time=6)
    tree = rows.tree([0, 3, 6], first=0, device=device)

    def states(ids: Tensor) -> Tensor:
        return tree_states(bundle, DecoderInputs(ids=ids), tree)[tree.place]

    return agree_with_rows(bundle, device, states)
