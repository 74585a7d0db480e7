"""Limits of ranks that come late to a change of phase, and of one in which nothing happens.

It imports neither torch nor lightning. `ragen_pl.ranks.rank_watch` has the connection and the thread.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass

# seconds after which a process is ended whose threads can't run, and between two changes of that limit
_FORCED_S, _CHANGE_S = 30.0, 5.0


@dataclass(frozen=True, slots=True)
class Change:
    """A change of phase that all ranks come to.

    Attributes:
        number: How many changes a rank has come to before.
        label: Name of the point in the run.
        limit_s: Seconds that the first rank that comes waits for the last one.
        count: Number of ranks.
        step: Distance of their numbers, 1 unless each machine has one rank that speaks for all of its.
    """

    number: int
    label: str
    limit_s: float
    count: int
    step: int = 1

    @property
    def ranks(self) -> range:
        """Numbers of the ranks that come to it."""
        return range(0, self.count, self.step)


@dataclass(frozen=True, slots=True)
class Late:
    """Ranks that are not at a change of phase in time."""

    change: Change
    ranks: tuple[int, ...]

    def line(self, hosts: dict[int, str]) -> str:
        """Return it in one line.

        Args:
            hosts: Machine of each rank that has connected itself.
        """
        named = named_ranks(self.ranks, hosts)
        return f"{self.change.label}: no answer from {named} for {self.change.limit_s:g} s"


def named_ranks(ranks: Collection[int], hosts: dict[int, str]) -> str:
    """Return ranks with their machines.

    >>> named_ranks([1, 8], {1: "n1"})
    'ranks 1 (n1), 8 (never started)'
    """
    named = ", ".join(
        f"{rank} ({hosts[rank]})" if rank in hosts else f"{rank} (never started)" for rank in ranks
    )
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}"


class Arrivals:
    """The changes of phase that some ranks have come to and others have not."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        # and when the first rank came
        self._open: dict[int, tuple[Change, float]] = {}

    def note(self, rank: int, change: Change, *, now: float) -> None:
        """Note that a rank has come to a change of phase.

        Args:
            rank: Its number.
            change: The change.
            now: Time in seconds.
        """
        self._last[rank] = change.number
        self._open.setdefault(change.number, (change, now))
        for number, (one, _) in list(self._open.items()):
            if not self._absent(one, ()):
                del self._open[number]

    def late(self, *, now: float, ended: Collection[int] = ()) -> Late | None:
        """Return the ranks that are late at the earliest change that has any.

        Args:
            now: Time in seconds.
            ended: Ranks that have ended by themselves, and are not missed.
        """
        for _, (change, since) in sorted(self._open.items()):
            if now - since > change.limit_s and (absent := self._absent(change, ended)):
                return Late(change, absent)
        return None

    def _absent(self, change: Change, ended: Collection[int]) -> tuple[int, ...]:
        return tuple(
            rank
            for rank in change.ranks
            if self._last.get(rank, -1) < change.number and rank not in ended
        )


class StallLimit:
    """Longest time of a rank in which nothing happens. The main thread moves it on, another one looks at it."""

    def __init__(self) -> None:
        self._label, self._limit_s, self._end = "", 0.0, float("inf")
        # of the end by force
        self._changed, self._forced_s = float("-inf"), 0.0

    def move(self, label: str, limit_s: float) -> None:
        """Begin the limit anew.

        Args:
            label: Where the run is.
            limit_s: Seconds until something else has to happen.
        """
        now = time.monotonic()
        self._label, self._limit_s, self._end = label, limit_s, now + limit_s
        is_longer = limit_s > self._forced_s
        if limit_s < float("inf") and (is_longer or now - self._changed > _CHANGE_S):
            self._changed, self._forced_s = now, limit_s
            if sys.__stderr__ is not None:
                faulthandler.dump_traceback_later(
                    limit_s + _CHANGE_S + _FORCED_S, exit=True, file=sys.__stderr__
                )

    def stop(self) -> None:
        """Suspend the rank's limits."""
        self._end = float("inf")
        if self._changed > 0:
            self._changed, self._forced_s = float("-inf"), 0.0
            faulthandler.cancel_dump_traceback_later()

    @property
    def place(self) -> str:
        """Where the run is, as the main thread has said last; empty before."""
        return self._label

    @property
    def expired(self) -> str | None:
        """The rank's error in one line if its limit is over."""
        if time.monotonic() < self._end:
            return None
        return f"{self._label}: nothing has happened for {self._limit_s:g} s (trainer.stall_s); its stacks are above"
