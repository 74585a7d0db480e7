"""Lockstep: ranks that share an engine give it the same requests in the same order, and step it equally often.

Under tensor parallelism each rank computes a part of every layer and schedules by itself. Ranks whose batches differ
would add up parts of different prompts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ragen_pl.base.distributed import sendable
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import GenerationRequest


@dataclass(kw_only=True, slots=True)
class RankUpdate:
    """Contribution of one rank to a step."""

    rank: int
    requests: list[tuple[str, GenerationRequest]] = field(default_factory=list)
    """New requests by name."""
    aborted: list[str] = field(default_factory=list)
    """Names of cancelled requests."""
    is_done: bool = False
    """Whether its rollout has ended."""
    digest: int = 0
    """Checksum of all finished responses, those of other ranks among them."""
    error: BaseException | None = None
    """Error that has ended its rollout."""


@dataclass(kw_only=True, slots=True)
class Step:
    """Work of all ranks before a step, in this order."""

    aborted: list[str]
    requests: list[tuple[str, GenerationRequest]]
    all_done: bool
    """Whether the rollouts of all ranks have ended, and there is nothing to step."""


class Lockstep:
    """Gathers the requests of ranks that share an engine.

    All ranks call `begin`, then `exchange` before each step, until it says that all are done or raises.

    Args:
        rank: Number of this rank in the group.
        gather: Returns every rank's update in the order of the ranks. It blocks until all have called it.
    """

    def __init__(self, rank: int, gather: Callable[[RankUpdate], Sequence[RankUpdate]]) -> None:
        self.rank, self._gather = rank, gather
        self.under_way = False
        """Whether a rollout is under way, in which all ranks exchange."""
        self.active: dict[str, None] = {}
        """Names of the requests of all ranks that the engine has."""
        self._count = 0
        self._digest = 0
        self._new: dict[str, GenerationRequest] = {}
        self._aborted: list[str] = []

    @classmethod
    def of_group(cls) -> Lockstep:
        """Return the lockstep of the ranks that hold a model of vLLM with this one."""
        from vllm.distributed import get_tp_group

        group = get_tp_group()

        def gather(update: RankUpdate) -> list[RankUpdate]:
            updates: list[Any] = [None] * group.world_size
            torch.distributed.all_gather_object(updates, update, group=group.cpu_group)
            return updates

        return cls(group.rank_in_group, gather)

    def begin(self) -> None:
        """Begin a rollout."""
        self.under_way = True

    def leave(self) -> None:
        """End a rollout on this rank without the others, which raise the same, or can't be reached."""
        self.under_way = False
        self._new.clear()
        self._aborted.clear()

    def submit(self, requests: Iterable[GenerationRequest]) -> dict[str, GenerationRequest]:
        """Queue requests for the next step; return them by name.

        Raises:
            RuntimeError: No rollout is under way.
        """
        if not self.under_way:
            raise RuntimeError(
                "ranks share this rollout engine: requests are submitted inside collective_rollout(), which all ranks "
                "enter"
            )
        named = {f"{self.rank}.{self._count + n}": request for n, request in enumerate(requests)}
        self._count += len(named)
        self._new |= named
        return named

    def abort(self, names: Iterable[str]) -> None:
        """Abort requests of this rank at the next step."""
        for name in names:
            if self._new.pop(name, None) is None:
                self._aborted.append(name)

    def finish(self, name: str, ids: Sequence[int]) -> None:
        """Note a finished response of any rank."""
        self.active.pop(name, None)
        self._digest = zlib.crc32(name.encode() + np.asarray(ids, np.int64).tobytes(), self._digest)

    def fail(self, error: BaseException) -> None:
        """Have the other ranks raise an error, where they can be reached."""
        if self.under_way:
            with suppress(BaseException):  # the error itself, or that there are no others any more
                self.exchange(error=error)

    def exchange(self, *, is_done: bool = False, error: BaseException | None = None) -> Step:
        """Gather the contributions of all ranks to the next step.

        Args:
            is_done: Whether the rollout of this rank has ended.
            error: What has ended it.

        Raises:
            BaseException: What has ended the rollout of some rank, on all of them.
            RolloutError: Ranks have sampled different tokens for a request.
        """
        update = RankUpdate(
            rank=self.rank,
            requests=list(self._new.items()),
            aborted=list(self._aborted),
            is_done=is_done,
            digest=self._digest,
            error=None if error is None else sendable(error),
        )
        self._new.clear()
        self._aborted.clear()
        try:
            updates = self._gather(update)
        except BaseException:
            self.leave()
            raise
        errors = [update.error for update in updates if update.error is not None]
        if errors:
            self.leave()
            raise error or errors[0]
        if len({update.digest for update in updates}) > 1:
            self.leave()
            raise RolloutError(
                "rollout.engine.settings.tensor_parallel_size: ranks that share an engine have sampled different "
                "tokens for a request; leave it out, or set rollout/engine=vllm_server"
            )
        aborted = [name for update in updates for name in update.aborted]
        requests = [request for update in updates for request in update.requests]
        for name in aborted:
            del self.active[name]
        self.active |= dict.fromkeys(name for name, _ in requests)
        all_done = all(update.is_done for update in updates)
        if all_done:
            self.leave()
        return Step(aborted=aborted, requests=requests, all_done=all_done)
