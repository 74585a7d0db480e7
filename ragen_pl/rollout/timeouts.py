"""Running environments' code so that one that hangs costs its own environment only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class _Sweep(Generic[T]):
    """A thread that runs jobs in order from `first` on, until it is abandoned."""

    def __init__(
        self, jobs: Sequence[Callable[[], T]], results: list[T | BaseException | None], first: int
    ) -> None:
        self.jobs, self.results = jobs, results
        self.current, self.began = first, time.monotonic()
        self.abandoned = False
        self.lock = threading.Lock()  # a result is kept or given up, never both
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self.current < len(self.jobs):
            number = self.current
            result: T | BaseException
            try:
                result = self.jobs[number]()
            except BaseException as error:  # even an exit costs its own trajectory only
                result = error
            with self.lock:
                if self.abandoned:
                    return
                self.results[number] = result
                self.current, self.began = number + 1, time.monotonic()

    def abandon(self, number: int, reason: BaseException) -> bool:
        """Give job `number` up unless it has just ended; return whether it was given up."""
        with self.lock:
            if self.current != number:
                return False
            self.abandoned, self.results[number] = True, reason
            return True


def run_guarded(
    jobs: Sequence[Callable[[], T]], *, timeout_s: float | None
) -> list[T | BaseException]:
    """Run the jobs one after another; return each one's result, or the exception that it raised.

    A job that runs longer than `timeout_s` seconds is left behind with a `TimeoutError` as its result
    and the others go on in a new thread. Without a limit everything runs in the caller's thread.
    """
    results: list[T | BaseException | None] = [None] * len(jobs)
    if timeout_s is None:
        for number, job in enumerate(jobs):
            try:
                results[number] = job()
            except Exception as error:
                results[number] = error
        return results  # type: ignore[return-value]
    sweep = _Sweep(jobs, results, 0)
    while sweep.thread.is_alive():
        sweep.thread.join(timeout_s)
        with sweep.lock:
            number, began = sweep.current, sweep.began
        if sweep.thread.is_alive() and time.monotonic() - began >= timeout_s:
            late = TimeoutError(f"the environment took longer than {timeout_s:g} s")
            if sweep.abandon(number, late):
                sweep = _Sweep(jobs, results, number + 1)
    return results  # type: ignore[return-value]
