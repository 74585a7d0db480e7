"""Keys and values that the in-process engine keeps between turns.

transformers' own dynamic cache copies everything it holds at every token; over a long episode the copying costs more
than the model. Here the buffers grow by doubling and a token writes only its own slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_FIRST_CAPACITY = 64


class InPlaceLayer(DynamicLayer):
    """Keys and values of one layer, `[rows, heads, capacity, head_dim]`, filled up to `length`."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append `[rows, heads, new, head_dim]` and return views of all slots in use."""
        end = self.length + key_states.shape[-2]
        keys, values = self._reserve(key_states, end)
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        return self._use(end)

    def select(self, rows: Tensor) -> InPlaceLayer:
        """Return a copy with these rows only."""
        layer = InPlaceLayer()
        if self.key_buffer is not None and self.value_buffer is not None:
            layer.key_buffer = self.key_buffer.index_select(0, rows)
            layer.value_buffer = self.value_buffer.index_select(0, rows)
            layer._use(self.length)
        return layer

    def merge(self, other: InPlaceLayer, rows: Tensor, first: int) -> None:
        """Copy the slots from `first` on of `other`, whose rows are `rows` of this layer."""
        assert other.key_buffer is not None and other.value_buffer is not None
        end = other.length
        buffers = self._reserve(other.key_buffer, end)
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

    def _use(self, length: int) -> tuple[Tensor, Tensor]:
        """Take the first `length` slots into use and return views of them."""
        assert self.key_buffer is not None and self.value_buffer is not None
        keys, values = self.key_buffer[:, :, :length], self.value_buffer[:, :, :length]
        self.length, self.is_initialized, self.keys, self.values = length, True, keys, values
        return keys, values

    def _reserve(self, like: Tensor, needed: int) -> tuple[Tensor, Tensor]:
        """Return the buffers with room for `needed` slots."""
        keys, values = self.key_buffer, self.value_buffer
        if keys is None or values is None or needed > keys.shape[2]:
            keys, values = self._grown(keys, like, needed), self._grown(values, like, needed)
            self.key_buffer, self.value_buffer = keys, values
        return keys, values

    def _grown(self, buffer: Tensor | None, like: Tensor, needed: int) -> Tensor:
        rows, capacity = (like.shape[0], 0) if buffer is None else (len(buffer), buffer.shape[2])
        size = max(_FIRST_CAPACITY, needed, 2 * capacity)
        grown = like.new_empty(rows, like.shape[1], size, like.shape[-1])
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown


class InPlaceCache(Cache):
    """One `InPlaceLayer` for each decoder layer."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=InPlaceLayer)

    @property
    def length(self) -> int:
        """Number of slots in use."""
        return self._in_place_layers[0].length if self._in_place_layers else 0

    @property
    def _in_place_layers(self) -> list[InPlaceLayer]:
        return cast("list[InPlaceLayer]", self.layers)

    def select(self, rows: Tensor) -> InPlaceCache:
        """Return a copy with these rows only."""
        cache = InPlaceCache()
        cache.layers = [layer.select(rows) for layer in self._in_place_layers]
        return cache

    def merge(self, other: InPlaceCache, rows: Tensor, first: int) -> None:
        """Copy the slots from `first` on of `other`, whose rows are `rows` of this cache."""
        for target, source in zip(self._in_place_layers, other._in_place_layers, strict=True):
            target.merge(source, rows, first)

    def memory_bytes(self) -> int:
        """Return the size of all buffers."""
        return sum(layer.memory_bytes() for layer in self._in_place_layers)


@dataclass(slots=True)
class SessionCache:
    """What is kept of sessions between turns. Row i of every tensor belongs to `sessions[i]`."""

    sessions: list[int]
    ids: list[np.ndarray]
    """Ids of each session whose keys and values are held, int64."""
    cache: InPlaceCache
    valid: Tensor
    """bool `[rows, slots]`, slots that hold a token of the row and no padding."""
    next_position: Tensor
    """int64 `[rows]`, position of each session's next token."""

    @classmethod
    def empty(cls, sessions: list[int], *, device: torch.device) -> SessionCache:
        """Return a cache that holds nothing of these sessions."""
        rows = len(sessions)
        return cls(
            sessions=sessions,
            ids=[np.zeros(0, np.int64)] * rows,
            cache=InPlaceCache(),
            valid=torch.zeros(rows, 0, dtype=torch.bool, device=device),
            next_position=torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def select(self, sessions: list[int]) -> SessionCache:
        """Return the cache of these sessions, in their order; itself if they are all."""
        if sessions == self.sessions:
            return self
        numbers = {session: row for row, session in enumerate(self.sessions)}
        rows = [numbers[session] for session in sessions]
        select = torch.tensor(rows, device=self.valid.device)
        return SessionCache(
            sessions=sessions,
            ids=[self.ids[row] for row in rows],
            cache=self.cache.select(select),
            valid=self.valid[select],
            next_position=self.next_position[select],
        )

    def share(self, ids: np.ndarray) -> None:
        """Give every session the only row of the cache, which holds `ids`."""
        rows = len(self.sessions)
        self.cache = self.cache.select(torch.zeros_like(self.next_position))
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
