"""Sampling a token by a step whose tensors stay where they are, so that a CUDA graph can replay it.

A step of a decoder is some thousand small kernels, which take the host longer to launch than a GPU to compute. A CUDA
graph launches them at once (https://docs.nvidia.com/cuda/cuda-programming-guide/, "CUDA Graphs"). It replays the same
kernels on the same addresses. So keys and values lie in buffers that calls share, attention reads a fixed window of
their slots under a mask, and the number of the slot that a token is written to is a tensor. Without a GPU the same step
runs without a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ragen_pl.engines.in_process.kv_cache import InPlaceCache, InPlaceLayer, SessionCache, selected
from ragen_pl.engines.in_process.memory import (
    FEWEST_ROWS,
    FEWEST_SLOTS,
    rounded_rows,
    rounded_slots,
)
from ragen_pl.engines.in_process.sampling import Sampled, SamplingParameters
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.inputs import added_to_scores, run_decoder, token_inputs
from ragen_pl.models.value_head import StateCritic

# tokens that may still be sampled, below which a graph is not worth its capture of one to two plain steps
_CAPTURE_FROM = 8


class Place(NamedTuple):
    """Where a step writes and what it reads."""

    rows: int
    window: int
    slot: Tensor


class StaticLayer(InPlaceLayer):
    """Keys and values of one layer in buffers with room for more rows and slots than are in use.

    Attributes:
        rows: Rows that new buffers have room for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def write(self, key_states: Tensor, value_states: Tensor, at: Place) -> tuple[Tensor, Tensor]:
        """Write one token of each row, and return views of the window's slots."""
        views = []
        for buffer, states in ((self.key_buffer, key_states), (self.value_buffer, value_states)):
            assert buffer is not None
            buffer[: at.rows].index_copy_(2, at.slot, states.to(buffer.dtype))
            views.append(buffer[: at.rows, :, : at.window])
        return views[0], views[1]

    def take(self, rows: Tensor, slots: Tensor | None) -> None:
        """Move rows and slots to the front; see `InPlaceCache.select`."""
        for buffer in (self.key_buffer, self.value_buffer):
            assert buffer is not None
            taken = selected(buffer[:, :, : self.length], rows, slots)
            buffer[: len(rows), :, : taken.shape[2]] = taken
        self.use(self.length if slots is None else slots.shape[1])

    def _reserve(
        self, key_states: Tensor, value_states: Tensor, needed: int
    ) -> tuple[Tensor, Tensor]:
        rows = len(key_states) if self.part is None else self.part[1]
        # a step doesn't grow buffers
        needed = max(needed, self.reserved)
        keys, values = self.key_buffer, self.value_buffer
        if keys is None or values is None or rows > len(keys) or needed > keys.shape[2]:
            keys = self._grown(keys, key_states, needed)
            values = self._grown(values, value_states, needed)
            self.key_buffer, self.value_buffer = keys, values
        return keys[:rows], values[:rows]

    def _grown(self, buffer: Tensor | None, like: Tensor, needed: int) -> Tensor:
        rows = len(like) if self.part is None else self.part[1]
        rows, slots = rounded_rows(max(rows, self.rows)), rounded_slots(needed)
        # slots that are masked must be finite
        grown = self._empty(buffer, like, rows, slots).zero_()
        if buffer is not None:
            both = min(rows, len(buffer))
            grown[:both, :, : self.length] = buffer[:both, :, : self.length]
        return grown


class StaticCache(InPlaceCache):
    """Keys and values whose buffers calls share. `select` moves rows inside them."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = 0
        self._place: Place | None = None

    def begin(self, *, rows: int, slots: int) -> StaticCache:
        """Forget what is held, and return the cache with room for so many rows and slots."""
        buffers = self.buffers()
        if any(rows > len(buffer) or slots > buffer.shape[2] for buffer in buffers):
            self.layers.clear()
        self._rows, self.shared_slots = rows, 0
        super().reserve(slots)
        self.use(0)
        return self

    def reserve(self, slots: int) -> None:
        """Give buffers that grow room for this many slots, or for those of `begin`."""
        super().reserve(max(slots, self._reserved))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a layer and return views of its slots: those in use, or those of the window in a step."""
        if self._place is not None:
            return self._static_layers[layer_idx].write(key_states, value_states, self._place)
        for layer in self._static_layers[layer_idx : layer_idx + 1]:
            layer.rows = self._rows
        return super().update(key_states, value_states, layer_idx)

    @contextmanager
    def step(self, place: Place) -> Iterator[None]:
        """Write one token of each row at a place."""
        self._place = place
        try:
            yield
        finally:
            self._place = None

    def select(
        self, rows: Tensor, slots: Tensor | None = None, *, free: bool = False
    ) -> StaticCache:
        """Keep these rows only, in place, and return the cache itself; see `InPlaceCache.select`."""
        self._rows = len(rows)
        for layer in self._static_layers:
            layer.take(rows, slots)
        return self

    @property
    def dtype(self) -> torch.dtype:
        """Type of keys and values."""
        return self.buffers()[0].dtype

    def buffers(self) -> list[Tensor]:
        """Return the buffers of all layers."""
        pairs = ((layer.key_buffer, layer.value_buffer) for layer in self._in_place_layers)
        return [buffer for buffer in chain.from_iterable(pairs) if buffer is not None]

    @property
    def _static_layers(self) -> list[StaticLayer]:
        return cast("list[StaticLayer]", self.layers)

    def _new_layer(self) -> StaticLayer:
        layer = StaticLayer()
        layer.rows = self._rows
        return layer


@dataclass(slots=True)
class Inputs:
    """Tensors that the step reads and changes, each with as many rows as the cache's buffers."""

    tokens: Tensor
    """int64 `[rows]`, the last token of each."""
    positions: Tensor
    """int64 `[rows]`, its position."""
    slot: Tensor
    """int64 `[1]`, the slot that it is written to."""
    valid: Tensor
    """bool `[rows, slots]`, slots to attend to."""
    draws: Tensor
    """float64 `[rows]`, the uniforms of the next token."""
    temperature: Tensor
    """float32 `[rows, 1]`."""
    greedy: Tensor
    """bool `[rows]`."""
    truncated: list[Tensor]
    """bool `[rows]` for each truncation of a call."""

    @classmethod
    def empty(cls, rows: int, slots: int, device: torch.device) -> Inputs:
        """Return inputs of rows that nothing was said of."""
        return cls(
            tokens=torch.zeros(rows, dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            slot=torch.zeros(1, dtype=torch.int64, device=device),
            valid=torch.zeros(rows, slots, dtype=torch.bool, device=device),
            draws=torch.zeros(rows, dtype=torch.float64, device=device),
            temperature=torch.ones(rows, 1, device=device),
            greedy=torch.zeros(rows, dtype=torch.bool, device=device),
            truncated=[],
        )


class _Graph(NamedTuple):
    """A captured step, and what it writes."""

    graph: torch.cuda.CUDAGraph
    sampled: Sampled


class StaticStep:
    """State that calls share: the buffers of keys and values, the step's inputs and its graphs.

    Args:
        bundle: Model.
        anticipates: Whether calls have room for the longest sessions that were seen, which then keep their graphs.

    Attributes:
        critic: Critic whose values are read; None for none. It may change between calls.
    """

    def __init__(self, bundle: ModelBundle, *, anticipates: bool = True) -> None:
        self.bundle = bundle
        self.anticipates = anticipates
        self.critic: StateCritic | None = None
        self.longest = 0
        self.cache = StaticCache()
        self.inputs: Inputs | None = None
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        # kinds of steps whose kernels have run before
        self._warm: set[tuple[object, ...]] = set()
        self._addresses: list[int] = []
        self._memory: Any = None

    @property
    def graphs(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def free(self) -> None:
        """Free all buffers and graphs."""
        self.cache = StaticCache()
        self.inputs = None
        self.forget_graphs()

    def forget_graphs(self) -> None:
        """Free the graphs and their memory."""
        self._graphs.clear()
        self._warm.clear()
        self._memory = None

    def begin(self, *, rows: int, slots: int) -> StaticCache:
        """Return the cache without a session, with room for so many rows and slots."""
        return self.cache.begin(rows=rows, slots=max(slots, self.longest))

    def window(self, slots: int) -> int:
        """Return how many slots a step reads where so many are needed.

        They are the longest sessions' or a half, a quarter and so on of them, since each number has its graphs.
        """
        window = rounded_slots(slots)
        if self.anticipates:
            window = self.longest = max(self.longest, window)
        while window % 128 == 0 and window // 2 >= max(slots, FEWEST_SLOTS):
            window //= 2
        return window

    def prepared(self) -> Inputs:
        """Return the inputs of a call whose prompts are computed. Graphs of tensors that have moved are dropped."""
        model, buffers = self.bundle.model, self.cache.buffers()
        # with a critic or without one, there are other addresses
        head = () if self.critic is None else self.critic.parameters()
        read = chain(model.parameters(), model.buffers(), buffers, head)
        addresses = [tensor.data_ptr() for tensor in read]
        if addresses != self._addresses:
            self.forget_graphs()
            self._addresses, self.inputs = addresses, None
        if self.inputs is None:
            rows, _, slots, _ = buffers[0].shape
            self.inputs = Inputs.empty(rows, slots, buffers[0].device)
        return self.inputs

    def run(self, place: Place, parameters: SamplingParameters, *, left: int) -> Sampled:
        """Feed the last tokens to the model and sample the next ones.

        Args:
            place: Where their keys and values are written.
            parameters: Parameters of the rows, parts of the inputs.
            left: Tokens that may still be sampled, this one included.
        """
        if place.slot.device.type != "cuda":
            return self._step(place, parameters)
        kind = (
            *place[:2],
            # a model's own pass reads what rows have in common once
            self.cache.shared_slots if self.bundle.token_pass is not None else 0,
            parameters.greedy if isinstance(parameters.greedy, bool) else None,
            *(truncation for truncation, _ in parameters.truncations),
        )
        if kind not in self._graphs:
            if kind not in self._warm or left < _CAPTURE_FROM:
                self._warm.add(kind)
                return self._step(place, parameters)
            self._graphs[kind] = self._captured(place, parameters)
        graph, sampled = self._graphs[kind]
        graph.replay()
        # the next replay writes over them
        return sampled.each(torch.clone)

    def _captured(self, place: Place, parameters: SamplingParameters) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        if self._memory is None:
            # graphs run one after the other, and what they leave is copied
            self._memory = torch.cuda.graph_pool_handle()
        try:
            # other threads may go on with what can't be captured
            with (
                torch.cuda.device(place.slot.device),
                torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"),
            ):
                sampled = self._step(place, parameters)
        except RuntimeError as error:
            raise RuntimeError(
                f"the decoder of {type(self.bundle.model).__name__} can't be captured as a CUDA graph ({error}); set "
                "rollout.engine.static_step=false"
            ) from error
        return _Graph(graph, sampled)

    def _step(self, place: Place, parameters: SamplingParameters) -> Sampled:
        inputs, rows = self.inputs, place.rows
        assert inputs is not None
        tokens, positions = inputs.tokens[:rows], inputs.positions[:rows]
        valid = inputs.valid[:rows, : place.window].index_fill_(1, inputs.slot, True)
        fed = token_inputs(self.bundle, tokens, positions=positions, valid=valid)
        assert fed.mask is not None
        fed.mask = added_to_scores(fed.mask, self.bundle, self.cache.dtype)
        with self.cache.step(place):
            states = run_decoder(
                self.bundle, fed, cache=self.cache, shared_slots=self.cache.shared_slots
            )
        sampled = parameters.sample_in(
            states[:, 0], inputs.draws[:rows], bundle=self.bundle, critic=self.critic
        )
        tokens.copy_(sampled.tokens)
        positions.add_(1)
        inputs.slot.add_(1)
        return sampled


class StaticBatch:
    """Rows that are sampled by a `StaticStep`; see `Batch`. Unfinished rows are moved before finished ones.

    Args:
        step: Step.
        held: Sessions of all requests, row i that of request i, in the step's cache.
        sampling: Parameters of all requests.
        limit: Largest number of tokens of a response.
        keep: Whether the sessions go on.
    """

    def __init__(
        self,
        step: StaticStep,
        held: SessionCache,
        sampling: SamplingParameters,
        *,
        limit: int,
        keep: bool,
    ) -> None:
        assert held.cache is step.cache
        count, self._slots = held.valid.shape
        self.rows = np.arange(count)
        # number of the request whose keys and values each row holds
        self._order = self.rows
        self._step, self._sampling, self._limit, self._keep = step, sampling, limit, keep
        self._size, self._window = rounded_rows(count), step.window(self._slots + limit)
        self._inputs = inputs = step.prepared()
        inputs.slot.fill_(self._slots)
        inputs.valid.zero_()
        inputs.valid[:count, : self._slots] = held.valid
        inputs.positions.zero_()
        inputs.positions[:count] = held.next_position
        inputs.tokens.zero_()
        self._parameters = self._loaded()

    def first(self, hidden: Tensor) -> Sampled:
        """Sample the first tokens; see `Batch`."""
        step, uniforms = self._step, self._sampling.uniforms[:, 0]
        sampled = self._sampling.sample_in(hidden, uniforms, bundle=step.bundle, critic=step.critic)
        self._inputs.tokens[: len(self.rows)] = sampled.tokens
        return sampled

    def next(self, step: int) -> Sampled:
        """Sample the next tokens; see `Batch`."""
        count = len(self.rows)
        self._inputs.draws[:count] = self._sampling.uniforms[:, step]
        place = Place(self._size, self._window, self._inputs.slot)
        sampled = self._step.run(place, self._parameters, left=self._limit - step)
        self._slots += 1
        return sampled.each(lambda tensor: tensor[:count])

    def drop(self, unfinished: np.ndarray) -> None:
        """Halve the rows once the unfinished ones fit; see `Batch`."""
        size = max(FEWEST_ROWS, rounded_rows(int(unfinished.sum())))
        if size > self._size // 2:
            return
        # unfinished rows first, and those before them that still hold a session
        front = np.argsort(~unfinished, kind="stable")
        order = np.concatenate([front, np.arange(len(front), len(self._order))])
        self._order, self.rows = self._order[order], self.rows[unfinished]
        index = torch.from_numpy(order).to(self._inputs.tokens.device)
        rows = index[: len(self.rows)]
        self._step.cache.use(self._slots)
        self._step.cache.select(index if self._keep else rows)
        for each in (self._inputs.tokens, self._inputs.positions, self._inputs.valid):
            each[: len(rows)] = each[rows]
        self._sampling, self._size = self._sampling.select(rows), size
        if not self._keep:
            self._order = self.rows
        self._parameters = self._loaded()

    def end(self) -> None:
        """Put the rows back into the order of the requests; see `Batch`."""
        self._step.cache.use(self._slots)
        if self._keep and len(self.rows) < len(self._order):
            index = torch.from_numpy(np.argsort(self._order)).to(self._inputs.tokens.device)
            self._step.cache.select(index)
        if torch.is_autocast_enabled(self._inputs.tokens.device.type):
            # they read weights in another type, which autocast frees at its end
            self._step.forget_graphs()

    def _loaded(self) -> SamplingParameters:
        """Return the parameters as parts of the step's inputs."""
        inputs, own, count = self._inputs, self._sampling, len(self.rows)
        inputs.temperature[:count] = own.temperature
        greedy: Tensor | bool = own.greedy
        if not isinstance(greedy, bool):
            inputs.greedy[:count] = greedy
            greedy = inputs.greedy[: self._size]
        while len(inputs.truncated) < len(own.truncations):
            inputs.truncated.append(torch.zeros_like(inputs.greedy))
        truncations = []
        for (truncation, rows), buffer in zip(own.truncations, inputs.truncated, strict=False):
            buffer[:count] = rows
            truncations.append((truncation, buffer[: self._size]))
        return SamplingParameters(
            uniforms=inputs.draws,
            temperature=inputs.temperature[: self._size],
            greedy=greedy,
            banned=own.banned,
            truncations=tuple(truncations),
        )
