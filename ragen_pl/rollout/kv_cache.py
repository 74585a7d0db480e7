"""A key-value cache that is written in place and kept between turns.

transformers' own dynamic cache copies everything it holds at every token; over a long episode that
copying costs more than the model. Here buffers grow by doubling and a token writes its own slot only.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

_FIRST_CAPACITY = 64


class InPlaceLayer(DynamicLayer):
    """Keys and values of one layer, `[rows, heads, capacity, head_dim]`, filled up to `length`."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append `[rows, heads, new, head_dim]` and return views of everything held."""
        end = self.length + key_states.shape[-2]
        self._reserve(key_states, end)
        assert self._keys is not None and self._values is not None
        self._keys[:, :, self.length : end] = key_states
        self._values[:, :, self.length : end] = value_states
        self.length, self.is_initialized = end, True
        self.keys, self.values = self._keys[:, :, :end], self._values[:, :, :end]
        return self.keys, self.values

    def select(self, rows: Tensor) -> InPlaceLayer:
        """Return a copy that holds these rows only."""
        layer = InPlaceLayer()
        if self._keys is not None and self._values is not None:
            layer._keys, layer._values = (
                self._keys.index_select(0, rows),
                self._values.index_select(0, rows),
            )
            layer.length, layer.is_initialized = self.length, True
            layer.keys, layer.values = (
                layer._keys[:, :, : layer.length],
                layer._values[:, :, : layer.length],
            )
        return layer

    def merge(self, other: InPlaceLayer, rows: Tensor, first: int) -> None:
        """Take over slots `first…` of `other`, whose rows are `rows` of this layer."""
        assert other._keys is not None and other._values is not None
        self._reserve(other._keys, other.length)
        assert self._keys is not None and self._values is not None
        end = other.length
        for mine, theirs in ((self._keys, other._keys), (self._values, other._values)):
            mine[:, :, self.length : end] = 0  # finite where a row has nothing, masked though it is
            mine[rows, :, first:end] = theirs[:, :, first:end]
        self.length = end

    def get_seq_length(self) -> int:
        """Return the number of slots in use."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the key length and offset that a mask for `query_length` new tokens needs."""
        return self.length + query_length, 0

    def _reserve(self, like: Tensor, needed: int) -> None:
        capacity = 0 if self._keys is None else self._keys.shape[-2]
        if needed <= capacity:
            return
        size = max(_FIRST_CAPACITY, needed, 2 * capacity)
        rows = like.shape[0] if self._keys is None else self._keys.shape[0]
        for name in ("_keys", "_values"):
            grown = like.new_empty(rows, like.shape[1], size, like.shape[-1])
            old = getattr(self, name)
            if old is not None:
                grown[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, grown)


class InPlaceCache(Cache):
    """One `InPlaceLayer` for each decoder layer."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=InPlaceLayer)

    @property
    def length(self) -> int:
        """The number of slots in use."""
        return self._own[0].length if self._own else 0

    @property
    def _own(self) -> list[InPlaceLayer]:
        return cast("list[InPlaceLayer]", self.layers)

    def select(self, rows: Tensor) -> InPlaceCache:
        """Return a copy that holds these rows only."""
        cache = InPlaceCache()
        cache.layers = [layer.select(rows) for layer in self._own]
        return cache

    def merge(self, other: InPlaceCache, rows: Tensor, first: int) -> None:
        """Take over slots `first…` of `other`, whose rows are `rows` of this cache."""
        for mine, theirs in zip(self._own, other._own, strict=True):
            mine.merge(theirs, rows, first)

    def memory_bytes(self) -> int:
        """Return what the buffers hold."""
        return sum(
            tensor.numel() * tensor.element_size()
            for layer in self._own
            for tensor in (layer._keys, layer._values)
            if isinstance(tensor, torch.Tensor)
        )
