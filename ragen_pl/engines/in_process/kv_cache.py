"""Keys and values that the in-process engine keeps between turns.

transformers' own dynamic cache copies everything it holds at every token; over a long episode the copying costs more
than the model. Here a call reserves its slots beforehand, and a token writes only its own slot. Keys and values are
held in the type that attention computes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ragen_pl.base.instances import instances

# the longest row's fraction of the slots, below which empty slots are left out
_DENSE_ABOVE = 0.9


class InPlaceLayer(DynamicLayer):
    """Keys and values of one layer, `[rows, heads, capacity, head_dim]`, filled up to `length`.

    Attributes:
        length: Slots in use.
        reserved: Slots that a new buffer has at least.
        part: Rows of a call that computes some of all rows, and the number of all rows; None for all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.length = self.reserved = 0
        self.part: tuple[slice, int] | None = None
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append `[rows, heads, new, head_dim]` and return views of all slots in use.

        The slots of a part of the rows are in use after the last part.
        """
        end = self.length + key_states.shape[-2]
        keys, values = self._reserve(key_states, value_states, end)
        rows = slice(None) if self.part is None else self.part[0]
        keys[rows, :, self.length : end] = key_states
        values[rows, :, self.length : end] = value_states
        if self.part is None or rows.stop == self.part[1]:
            self.use(end)
        return keys[rows, :, :end], values[rows, :, :end]

    def select(self, rows: Tensor, slots: Tensor | None = None) -> InPlaceLayer:
        """Return a copy with these rows only; see `InPlaceCache.select`."""
        layer = InPlaceLayer()
        if self.key_buffer is not None and self.value_buffer is not None:
            layer.key_buffer = selected(self.key_buffer, rows, slots)
            layer.value_buffer = selected(self.value_buffer, rows, slots)
            layer.reserved = self.reserved
            layer.use(self.length if slots is None else slots.shape[1])
        return layer

    def free(self) -> None:
        """Free the buffers. The layer is not used again."""
        self.key_buffer = self.value_buffer = self.keys = self.values = None

    def merge(self, other: InPlaceLayer, rows: Tensor, first: int) -> None:
        """Copy the slots from `first` on of `other`, whose rows are `rows` of this layer."""
        assert other.key_buffer is not None and other.value_buffer is not None
        end = other.length
        assert other.value_buffer is not None
        buffers = self._reserve(other.key_buffer, other.value_buffer, end)
        for target, source in zip(buffers, (other.key_buffer, other.value_buffer), strict=True):
            # rows that are not in `other` are masked there, but must stay finite
            target[:, :, self.length : end] = 0
            target[rows, :, first:end] = source[:, :, first:end]
        self.length = end

    def get_seq_length(self) -> int:
        """Return the number of slots in use."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the key length and the offset of a mask for `query_length` new tokens."""
        return self.length + query_length, 0

    def memory_bytes(self) -> int:
        """Return the size of the buffers."""
        buffers = (self.key_buffer, self.value_buffer)
        return sum(
            buffer.numel() * buffer.element_size() for buffer in buffers if buffer is not None
        )

    def use(self, length: int) -> None:
        """Take the first `length` slots into use."""
        assert self.key_buffer is not None and self.value_buffer is not None
        keys, values = self.key_buffer[:, :, :length], self.value_buffer[:, :, :length]
        self.length, self.is_initialized, self.keys, self.values = length, True, keys, values

    def _reserve(
        self, key_states: Tensor, value_states: Tensor, needed: int
    ) -> tuple[Tensor, Tensor]:
        """Return the buffers with room for `needed` slots."""
        keys, values = self.key_buffer, self.value_buffer
        if keys is None or values is None or needed > keys.shape[2]:
            keys = self._grown(keys, key_states, needed)
            values = self._grown(values, value_states, needed)
            self.key_buffer, self.value_buffer = keys, values
        return keys, values

    def _grown(self, buffer: Tensor | None, like: Tensor, needed: int) -> Tensor:
        if buffer is not None:
            rows, capacity = len(buffer), buffer.shape[2]
        else:
            rows, capacity = like.shape[0] if self.part is None else self.part[1], 0
        # without a reservation, doubling keeps the copying in proportion
        size = max(needed, self.reserved or 2 * capacity)
        grown = self._empty(buffer, like, rows, size)
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown

    def _empty(self, buffer: Tensor | None, like: Tensor, rows: int, slots: int) -> Tensor:
        """Return a new buffer for states `like`, of the type of the one before."""
        dtype = _compute_dtype(like) if buffer is None else buffer.dtype
        return like.new_empty(rows, like.shape[1], slots, like.shape[-1], dtype=dtype)


def selected(buffer: Tensor, rows: Tensor, slots: Tensor | None) -> Tensor:
    """Return a copy of rows, and of the slots `[rows, slots]` of each; None for all slots."""
    if slots is None:
        return buffer.index_select(0, rows)
    return buffer[rows[:, None], :, slots].transpose(1, 2)


def _compute_dtype(states: Tensor) -> torch.dtype:
    """Return the type that attention computes in: under autocast, not that of rotated keys."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


class InPlaceCache(Cache):
    """One `InPlaceLayer` for each decoder layer.

    Attributes:
        shared_slots: Number of first slots that hold the same token in all rows.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=InPlaceLayer)
        self.shared_slots = 0
        self._reserved = 0
        self._part: tuple[slice, int] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a layer and return views of all its slots in use."""
        while len(self.layers) <= layer_idx:
            self.layers.append(self._new_layer())
        layer = self._in_place_layers[layer_idx]
        layer.reserved, layer.part = self._reserved, self._part
        return layer.update(key_states, value_states)

    def reserve(self, slots: int) -> None:
        """Give buffers that grow from now on room for this many slots."""
        self._reserved = slots

    @contextmanager
    def only(self, rows: slice, *, total_rows: int) -> Iterator[None]:
        """Compute a part of the `total_rows` rows of a call. The parts follow each other."""
        self._part = rows, total_rows
        try:
            yield
        finally:
            self._part = None

    @property
    def length(self) -> int:
        """Number of slots in use."""
        return self._in_place_layers[0].length if self._in_place_layers else 0

    def _new_layer(self) -> InPlaceLayer:
        return InPlaceLayer()

    @property
    def _in_place_layers(self) -> list[InPlaceLayer]:
        return cast("list[InPlaceLayer]", self.layers)

    def select(
        self, rows: Tensor, slots: Tensor | None = None, *, free: bool = False
    ) -> InPlaceCache:
        """Return a copy with these rows only.

        Args:
            rows: Rows, int64 `[rows]`.
            slots: Slots that each of these rows keeps, in their new order, int64 `[rows, slots]`; None for all.
            free: Whether each layer is freed once it is copied. This cache is then not used again.
        """
        cache = InPlaceCache()
        cache.reserve(self._reserved)
        # slots that are left out come after the shared ones
        cache.shared_slots = self.shared_slots
        for layer in self._in_place_layers:
            cache.layers.append(layer.select(rows, slots))
            if free:
                layer.free()
        return cache

    def merge(self, other: InPlaceCache, rows: Tensor, first: int) -> None:
        """Copy the slots from `first` on of `other`, whose rows are `rows` of this cache."""
        for target, source in zip(self._in_place_layers, other._in_place_layers, strict=True):
            target.merge(source, rows, first)

    def use(self, length: int) -> None:
        """Take exactly the first slots into use."""
        for layer in self._in_place_layers:
            layer.use(length)

    def memory_bytes(self) -> int:
        """Return the size of all buffers."""
        return sum(layer.memory_bytes() for layer in self._in_place_layers)


class StateCache(DynamicCache):
    """transformers' own cache, for models with layers that keep a state instead of keys and values.

    Args:
        config: Config of the decoder.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.config = config
        self.shared_slots = 0

    @property
    def length(self) -> int:
        """Number of slots in use."""
        return int(self.get_seq_length())

    def select(self, rows: Tensor, *, free: bool = False) -> StateCache:
        """Keep these rows only, and return the cache itself; nothing else of it is left to free."""
        self.reorder_cache(rows)  # type: ignore[arg-type]
        return self

    def reserve(self, slots: int) -> None:
        """Do nothing: this cache grows by itself."""

    def memory_bytes(self) -> int:
        """Return the size of all keys, values and states."""
        held = tree_leaves([vars(layer) for layer in self.layers])
        return sum(tensor.nbytes for tensor in instances(held, Tensor))


@dataclass(slots=True)
class SessionCache:
    """Keys and values of sessions between turns, row i those of `sessions[i]`: EMPTY → HELD → HELD, or HELD → EMPTY.

    A row is EMPTY where none of its slots is valid, so the whole prompt is computed. `commit` and `share` make it HELD.
    It stays HELD as long as each prompt continues the ids that are held, and only the new ids are computed. Another
    prompt, such as that of a window that has moved, makes it EMPTY.

    Example:
        Two turns of one session, then a window that drops the first turn::

            new_ids([[1, 2]])           # [[1, 2]]; EMPTY
            commit([[1, 2]], [[3, 4]])  # HELD, ids [1, 2, 3]: the last token was never fed to the model
            new_ids([[1, 2, 3, 4, 5]])  # [[4, 5]]; HELD
            commit([[1, 2, 3, 4, 5]], [[6, 7]])  # HELD, ids [1, 2, 3, 4, 5, 6]
            new_ids([[5, 6, 7, 8]])     # [[5, 6, 7, 8]]; EMPTY until the next commit
    """

    sessions: list[int]
    ids: list[np.ndarray]
    """Ids of each session whose keys and values are held, int64."""
    cache: InPlaceCache | StateCache
    valid: Tensor
    """bool `[rows, slots]`, slots that hold a token of the row and no padding."""
    next_position: Tensor
    """int64 `[rows]`, position of each session's next token."""

    @classmethod
    def empty(
        cls, sessions: list[int], *, device: torch.device, cache: InPlaceCache | StateCache
    ) -> SessionCache:
        """Return a cache that holds nothing of these sessions.

        Args:
            sessions: Numbers of the sessions.
            device: Device of the model.
            cache: Empty cache.
        """
        rows = len(sessions)
        return cls(
            sessions=sessions,
            ids=[np.zeros(0, np.int64)] * rows,
            cache=cache,
            valid=torch.zeros(rows, 0, dtype=torch.bool, device=device),
            next_position=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def select(self, sessions: list[int]) -> SessionCache:
        """Return the cache of these sessions, in their order; itself if they are all and few slots are empty.

        Prompts and responses are not equally long, so a row has empty slots after each turn, which attention reads too.
        """
        numbers = {session: row for row, session in enumerate(self.sessions)}
        rows = [numbers[session] for session in sessions]
        select = torch.tensor(rows, device=self.valid.device)
        valid, slots = self.valid[select], None
        longest = int(valid.sum(1).max())
        if longest < _DENSE_ABOVE * valid.shape[1]:
            # those that hold a token come first
            slots = valid.sort(dim=1, descending=True, stable=True).indices[:, :longest]
            valid = valid.gather(1, slots)
        elif sessions == self.sessions:
            return self
        assert isinstance(self.cache, InPlaceCache)
        return SessionCache(
            sessions=sessions,
            ids=[self.ids[row] for row in rows],
            cache=self.cache.select(select, slots),
            valid=valid,
            next_position=self.next_position[select],
        )

    def share(self, ids: np.ndarray) -> None:
        """Give every session the only row of the cache, which holds `ids`."""
        rows = len(self.sessions)
        self.cache = self.cache.select(torch.zeros_like(self.next_position))
        self.cache.shared_slots = len(ids)
        self.ids = [ids] * rows
        self.valid = self.valid.new_ones(rows, len(ids))
        self.next_position = self.next_position + len(ids)

    def new_ids(self, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the ids of each prompt that are not held; forget a session whose prompt does not continue its ids."""
        new_ids = []
        for row, (prompt, held) in enumerate(zip(prompts, self.ids, strict=True)):
            count = len(held)
            if count and not (len(prompt) > count and np.array_equal(prompt[:count], held)):
                self.valid[row], self.next_position[row], count = False, 0, 0
                self.cache.shared_slots = 0
            new_ids.append(prompt[count:])
        return new_ids

    def commit(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> None:
        """Mark as held each prompt and its response without the last token, which was never fed to the model."""
        slots, prompt_slots = self.cache.length, self.valid.shape[1]
        valid = self.valid.new_zeros(len(responses), slots)
        valid[:, :prompt_slots] = self.valid
        fed = torch.tensor([len(response) - 1 for response in responses], device=valid.device)
        columns = torch.arange(slots - prompt_slots, device=valid.device)
        valid[:, prompt_slots:] = columns < fed[:, None]
        self.valid, self.next_position = valid, self.next_position + fed
        self.ids = [
            np.concatenate([prompt, response[:-1]])
            for prompt, response in zip(prompts, responses, strict=True)
        ]
