"""Rollout that is sampled while the iteration before it trains."""

from __future__ import annotations

import logging
import math
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ragen_pl.base.distributed import all_ranks_do, gather_over_ranks, rank, sendable, world_size
from ragen_pl.base.error_text import error_text
from ragen_pl.checkpoints.rank_states import save_rank_states
from ragen_pl.data.settings import IterationsAhead
from ragen_pl.engines.errors import RolloutError
from ragen_pl.rollout.proxy import Progress
from ragen_pl.trajectory import (
    Action,
    EpisodeStatus,
    FailureCause,
    Observation,
    ProgramCall,
    Span,
    Statement,
    Summary,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    from ragen_pl.rollout.background import BackgroundRollout

log = logging.getLogger(__name__)
# numpy's own pickles of arrays, which can break memory and are not read
_OLD_ARRAYS = r"numpy(\._?core)?(\.\w+)?\.(_reconstruct|_frombuffer|scalar|dtype) is not known"


@dataclass(kw_only=True, slots=True)
class PlayedRollout:
    """A finished rollout.

    Attributes:
        iteration: Iteration that trains on it.
        weights_of: Iteration before whose update the policy had the weights that sampled it.
        trajectories: This rank's trajectories, with the rewards of the run's functions.
    """

    iteration: int
    weights_of: int
    trajectories: list[Trajectory]

    @property
    def staleness(self) -> int:
        """Number of updates between the weights that sampled it and those that train on it."""
        return self.iteration - self.weights_of


_CLASSES = (
    PlayedRollout, Trajectory, Turn, Action, ProgramCall, Summary, Observation, Statement, EpisodeStatus, FailureCause,
    Span,
)  # fmt: skip


def _unpacked(data: bytes) -> PlayedRollout:
    from ragen_pl.checkpoints.known_pickle import unpacked

    rollout: PlayedRollout = unpacked(data, _CLASSES)
    return rollout


class AheadState(StrEnum):
    """State of the rollout for a later iteration, see `RolloutAhead`."""

    NONE = "none"
    UNDER_WAY = "under way"
    PLAYED = "played"
    FAILED = "failed"


class RolloutAhead:
    """The rollout for a later iteration, at most one: NONE → UNDER_WAY → PLAYED or FAILED → NONE.

    All ranks call each method together, and their states are equal. `begin` starts a rollout, `wait` ends UNDER_WAY,
    `played` returns it or raises its error, and `drop` leads from each state to NONE. Checkpoints hold PLAYED.

    Args:
        max_staleness: Largest staleness; 0 for no rollouts ahead.
        reward: Applies the reward functions to trajectories. It may gather over ranks.

    Example:
        One iteration ahead. The DataModule's `collect` makes the calls of an iteration::

            call        state
            played(0)   NONE        returns None, so `collect` plays iteration 0 itself
            begin(1)    UNDER_WAY   a thread plays iteration 1 while iteration 0 is prepared and trained
            played(1)   PLAYED      waits for the thread; the weights are one update old
            drop()      NONE        iteration 1 has been collated
            begin(2)    UNDER_WAY
            wait()      FAILED      an environment's error on any rank; `played(2)` raises it and leads to NONE
    """

    def __init__(
        self, max_staleness: IterationsAhead, reward: Callable[[list[Trajectory]], None]
    ) -> None:
        self.max_staleness, self._reward = max_staleness, reward
        self._numbers = (-1, -1)
        self._under_way: BackgroundRollout | None = None
        # of one that has ended, at most one of both
        self._played: PlayedRollout | None = None
        self._error: BaseException | None = None

    @property
    def state(self) -> AheadState:
        """The present state. A thread that has ended is UNDER_WAY until `wait`."""
        if self._under_way is not None:
            return AheadState.UNDER_WAY
        if self._played is not None:
            return AheadState.PLAYED
        return AheadState.NONE if self._error is None else AheadState.FAILED

    def begin(self, iteration: int, rollout: BackgroundRollout, *, weights_of: int) -> None:
        """Take over a rollout that has begun; see `PlayedRollout`."""
        self._numbers = (iteration, weights_of)
        self._under_way = rollout

    def wait(self) -> None:
        """Wait until no rollout is under way. `played` raises the error that has ended one."""
        if (rollout := self._under_way) is None:
            return
        trajectories: list[Trajectory] = []
        error: Exception | None = None
        try:
            trajectories = rollout.result()
        except Exception as raised:
            # an exception of a signal handler passes, and the thread is stopped
            rollout.wait()
            error = raised
        self._under_way = None
        errors = gather_over_ranks(None if error is None else sendable(error))
        if (first := next(filter(None, errors), None)) is not None:
            self._error = error or first
            return
        self._reward(trajectories)
        iteration, weights_of = self._numbers
        self._played = PlayedRollout(
            iteration=iteration, weights_of=weights_of, trajectories=trajectories
        )

    def played(self, iteration: int, *, progress: Progress | None = None) -> PlayedRollout | None:
        """Return the rollout for an iteration, None if there is none. It is kept until `drop`.

        Args:
            iteration: Present iteration.
            progress: See `AgentProxy.rollout`.

        Raises:
            RolloutError: It is for another iteration, or sampled with older weights than allowed.
        """
        if (under_way := self._under_way) is not None:
            # a rank that ends the run here ends all: they meet once, however they fare
            all_ranks_do(lambda: under_way.wait(progress=progress))
        self.wait()
        if (error := self._error) is not None:
            self._error = None
            raise error
        if (played := self._played) is None:
            return None
        if played.iteration != iteration or not 0 <= played.staleness <= self.max_staleness:
            raise RolloutError(
                f"rollout.iterations_ahead={self.max_staleness}: iteration {iteration} got a rollout for iteration "
                f"{played.iteration} with the weights of iteration {played.weights_of}; the DataModule's "
                "collect has to be called once in each iteration"
            )
        if progress is not None:
            total = len(played.trajectories)
            all_ranks_do(lambda: progress(total, total))
        return played

    def drop(self, *, wait: bool = False) -> None:
        """Stop a rollout under way and forget a finished one.

        Args:
            wait: See `BackgroundRollout.stop`.
        """
        if self._under_way is not None:
            self._under_way.stop(wait=wait)
        self._under_way = self._played = self._error = None

    def state_dict(self) -> list[Tensor] | dict[str, Any] | None:
        """Wait for a rollout under way; return each rank's as the bytes of a pickle, None without one.

        Raises:
            RolloutError: It can't be pickled.
        """
        self.wait()
        if self._played is None:
            return None
        from ragen_pl.checkpoints.known_pickle import packed

        try:
            data = packed(self._played)
            # what can't be read must not be written
            _unpacked(data)
        except (pickle.PickleError, TypeError, AttributeError) as error:
            raise RolloutError(
                f"rollout.iterations_ahead={self.max_staleness}: a checkpoint holds the rollout ahead, which can't be "
                f"pickled ({error_text(error)}); return plain values in the environment's info, or set "
                "rollout.iterations_ahead=0"
            ) from error
        # a tensor, which files without other objects may hold
        return save_rank_states(torch.frombuffer(bytearray(data), dtype=torch.uint8), name="ahead")

    def load_state_dict(self, state: Sequence[Tensor] | None) -> None:
        """Restore `state_dict` on any number of ranks. Without rollouts ahead the next one is sampled anew.

        Raises:
            RolloutError: It is none.
        """
        if state is None:
            return
        if not self.max_staleness:
            log.info(
                "rollout.iterations_ahead=0: the rollout ahead in the checkpoint is sampled again, with present weights"
            )
            return
        # a group is on the rank of its number modulo the number of ranks, so other parts have none of this rank's
        step = math.gcd(len(state), world_size())
        try:
            parts = [
                _unpacked(np.asarray(state[number]).tobytes())
                for number in range(rank() % step, len(state), step)
            ]
        except pickle.UnpicklingError as error:
            if not re.search(_OLD_ARRAYS, str(error)):
                raise RolloutError(
                    f"the rollout ahead in the checkpoint can't be read ({error}); give a checkpoint that ragen_pl "
                    "wrote, or set rollout.iterations_ahead=0"
                ) from error
            log.warning(
                "the rollout ahead in the checkpoint is of an earlier version: it is sampled again, with present "
                "weights"
            )
            return
        trajectories = [one for part in parts for one in part.trajectories]
        own = [one for one in trajectories if one.game % world_size() == rank()]
        own.sort(key=lambda one: (one.game, one.member, one.seat))
        first = parts[0]
        self._played = PlayedRollout(
            iteration=first.iteration, weights_of=first.weights_of, trajectories=own
        )
