"""The end of a rollout in which nothing happens any more."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType

from ragen_pl.base.distributed import tell_error
from ragen_pl.base.machine import print_stacks
from ragen_pl.engines.errors import RolloutError

# seconds for a run to end by itself; other ranks are notified of the error meanwhile
_END_S = 20.0


class StallWatch:
    """Watch over the turns of a rollout: WATCHING → STALLED → the error is raised, or the process is ended.

    A thread prints the stacks of all threads after a time without the end of any turn. The error is raised by the next
    `check`. Where none follows, since the rollout hangs in an engine or in an environment that is being made, the
    process is ended.

    Args:
        limit_s: Seconds without the end of a turn; None for no limit.
        end_s: Seconds for `check` to follow.

    Example:
        `limit_s=900` and `end_s=20`. The loop of a rollout calls `check` before each step::

            time    call                    state
            0 s     __enter__               WATCHING  a thread waits
            40 s    check(turn_ended=True)  WATCHING  until 940 s
            700 s   check()                 WATCHING  no turn has ended, still until 940 s
            940 s                           STALLED   the thread prints all stacks and notifies the other ranks
            950 s   check()                 raises the error
            960 s                           without that call the process would be ended
    """

    def __init__(self, limit_s: float | None, *, end_s: float = _END_S) -> None:
        self.limit_s, self._end_s = limit_s, end_s
        self._last = time.monotonic()
        self._ended = threading.Event()
        self._error: RolloutError | None = None

    def __enter__(self) -> StallWatch:
        """Begin to watch."""
        if self.limit_s is not None:
            self._last = time.monotonic()
            threading.Thread(
                target=self._watch, args=(self.limit_s,), name="stall watch", daemon=True
            ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the watch."""
        self._ended.set()

    def check(self, *, turn_ended: bool = False) -> None:
        """Note that the rollout goes on, and whether a turn has ended.

        Raises:
            RolloutError: None has ended for too long.
        """
        if self._error is not None:
            raise self._error
        if turn_ended:
            self._last = time.monotonic()

    def _watch(self, limit_s: float) -> None:
        while (left := self._last + limit_s - time.monotonic()) > 0:
            if self._ended.wait(left):
                return
        print_stacks()
        error = RolloutError(
            f"rollout.failures.stall_s={limit_s:g}: no turn of any episode has ended for {limit_s:g} s; the stacks "
            "above show what this process waits for; raise it if turns may take longer"
        )
        self._error = error
        tell_error(error)
        if not self._ended.wait(self._end_s):
            print(f"ragen_pl: {error}", file=sys.__stderr__, flush=True)
            os._exit(2)
