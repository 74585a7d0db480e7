"""Run the code of environments with a time limit; one that hangs does not stop the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class _Worker(Generic[T]):
    """Thread that runs jobs in order from `first` on, until it is abandoned."""

    def __init__(
        self, jobs: Sequence[Callable[[], T]], results: list[T | BaseException | None], first: int
    ) -> None:
        self.jobs, self.results = jobs, results
        self.current, self.began = first, time.monotonic()
        self.abandoned = False
        # a result is kept or given up, never both
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while self.current < len(self.jobs):
            number = self.current
            result: T | BaseException
            try:
                result = self.jobs[number]()
            # even an exit fails its own trajectory only
            except BaseException as error:
                result = error
            with self.lock:
                if self.abandoned:
                    return
                self.results[number] = result
                self.current, self.began = number + 1, time.monotonic()

    def abandon(self, number: int, reason: BaseException) -> bool:
        """Give a job up unless it has just ended; return whether it was given up."""
        with self.lock:
            if self.current != number:
                return False
            self.abandoned, self.results[number] = True, reason
            return True


def run_guarded(
    jobs: Sequence[Callable[[], T]], *, timeout_s: float | None
) -> list[T | BaseException]:
    """Run jobs one after another and return the result or the exception of each.

    A job that takes longer than `timeout_s` seconds is abandoned with a `TimeoutError` as its result, and
    the others continue in a new thread. Without a limit all jobs run in the caller's thread.
    """
    results: list[T | BaseException | None] = [None] * len(jobs)
    if timeout_s is None:
        for number, job in enumerate(jobs):
            try:
                results[number] = job()
            except Exception as error:
                results[number] = error
        return results  # type: ignore[return-value]
    worker = _Worker(jobs, results, 0)
    while worker.thread.is_alive():
        worker.thread.join(timeout_s)
        with worker.lock:
            number, began = worker.current, worker.began
        if worker.thread.is_alive() and time.monotonic() - began >= timeout_s:
            late = TimeoutError(f"the environment took longer than {timeout_s:g} s")
            if worker.abandon(number, late):
                worker = _Worker(jobs, results, number + 1)
    return results  # type: ignore[return-value]
