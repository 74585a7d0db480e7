"""The rows whose responses are sampled in one engine call, and their next tokens."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ragen_pl.engines.in_process.kv_cache import InPlaceCache, SessionCache
from ragen_pl.engines.in_process.memory import DROP_BELOW
from ragen_pl.engines.in_process.sampling import Sampled, SamplingParameters
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.inputs import run_decoder, token_inputs
from ragen_pl.models.value_head import StateCritic


class Batch(Protocol):
    """Rows of a call. Nothing is read from the device, except by `drop`'s caller."""

    rows: np.ndarray
    """int64, numbers of the requests that are sampled, one for each row."""

    def first(self, hidden: Tensor) -> Sampled:
        """Sample the first tokens from the states of the prompts' last tokens, `[requests, hidden]`."""
        ...

    def next(self, step: int) -> Sampled:
        """Feed the last tokens to the model and sample those of number `step`, counted from 0."""
        ...

    def drop(self, unfinished: np.ndarray) -> None:
        """Drop finished rows where this is worth the copying; `unfinished` is bool `[rows]`."""
        ...

    def end(self) -> None:
        """Put the keys and values of all requests in the place of the held ones, if the sessions go on."""
        ...


class GrowingBatch:
    """Rows whose attention reads as many slots as are in use. Finished rows are dropped from a copy of the cache.

    Args:
        bundle: Model.
        held: Sessions of all requests, row i that of request i.
        sampling: Parameters of all requests.
        limit: Largest number of tokens of a response.
        keep: Whether the sessions go on.
        critic: Critic whose values are read; None for none.
    """

    def __init__(
        self,
        bundle: ModelBundle,
        held: SessionCache,
        sampling: SamplingParameters,
        *,
        limit: int,
        keep: bool,
        critic: StateCritic | None = None,
    ) -> None:
        self.bundle, self.held, self.keep, self.critic = bundle, held, keep, critic
        self.rows = np.arange(len(held.sessions))
        self._cache, self._sampling, self._positions = held.cache, sampling, held.next_position
        # a cache of states only does not know its length
        self._slots = self._merged = held.valid.shape[1]
        # no mask is needed while every slot holds a token of its row
        full = bool(held.valid.all())
        self._valid = None if full else functional.pad(held.valid, (0, limit), value=True)
        self._tokens = self._positions

    def first(self, hidden: Tensor) -> Sampled:
        """Sample the first tokens; see `Batch`."""
        return self._sample(hidden, 0)

    def next(self, step: int) -> Sampled:
        """Sample the next tokens; see `Batch`."""
        self._slots += 1
        inputs = token_inputs(
            self.bundle,
            self._tokens,
            positions=self._positions,
            valid=None if self._valid is None else self._valid[:, : self._slots],
        )
        self._positions = self._positions + 1
        hidden = run_decoder(
            self.bundle, inputs, cache=self._cache, shared_slots=self._cache.shared_slots
        )
        return self._sample(hidden[:, 0], step)

    def _sample(self, hidden: Tensor, step: int) -> Sampled:
        uniforms = self._sampling.uniforms[:, step]
        sampled = self._sampling.sample_in(hidden, uniforms, bundle=self.bundle, critic=self.critic)
        self._tokens = sampled.tokens
        return sampled

    def drop(self, unfinished: np.ndarray) -> None:
        """Drop finished rows; see `Batch`."""
        if unfinished.sum() >= DROP_BELOW * len(self.rows):
            return
        self._merge()
        index = torch.from_numpy(unfinished.nonzero()[0]).to(self._tokens.device)
        self.rows, self._merged = self.rows[unfinished], self._slots
        # only the cache of sessions that go on is read again
        copied = self._cache is not self.held.cache
        self._cache = self._cache.select(index, free=not self.keep or copied)
        self._sampling, self._tokens = self._sampling.select(index), self._tokens[index]
        self._positions = self._positions[index]
        self._valid = None if self._valid is None else self._valid[index]
        if not self.keep:
            # frees the memory of the other rows
            self.held.cache = self._cache

    def end(self) -> None:
        """Give the sessions the slots of all rows; see `Batch`."""
        self._merge()

    def _merge(self) -> None:
        if self.keep and self._cache is not self.held.cache:
            assert isinstance(self.held.cache, InPlaceCache)
            assert isinstance(self._cache, InPlaceCache)
            rows = torch.from_numpy(self.rows).to(self._tokens.device)
            self.held.cache.merge(self._cache, rows, self._merged)
