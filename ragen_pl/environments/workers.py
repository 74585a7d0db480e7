"""Threads that run the code of environments, with a time limit.

An environment stays in one thread from its creation on, as libraries for browsers and graphics ask for. A thread whose
job hangs is abandoned, and a new one takes over the jobs behind it.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count as count_up
from itertools import islice
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
Job: TypeAlias = Callable[[], T]
Outcome: TypeAlias = T | BaseException
"""What a job returned or raised."""


class TimeLimitExceeded(TimeoutError):
    """A job took longer than its time limit. It may still run."""


@dataclass(frozen=True, slots=True)
class _Batch(Generic[T]):
    """Numbered jobs for one thread, and the longest time of each in seconds."""

    jobs: Sequence[tuple[int, Job[T]]] = ()
    timeout_s: float | None = None


@dataclass(slots=True)
class _Thread(Generic[T]):
    """A thread that runs batches of jobs in order: WAITING → RUNNING → WAITING, or RUNNING → ABANDONED.

    WAITING has no job and no `due`. RUNNING has `due`, the time at which the present job is late; without a time limit
    there is none. ABANDONED is final: the job may run on, and its outcome is ignored.
    """

    finished: queue.SimpleQueue[list[tuple[int, Outcome[T]]]]
    batches: queue.SimpleQueue[_Batch[T] | None] = field(default_factory=queue.SimpleQueue)
    # held while an outcome is added or the thread is abandoned, so a job has exactly one outcome
    lock: threading.Lock = field(default_factory=threading.Lock)
    batch: _Batch[T] = field(default_factory=_Batch)
    outcomes: list[tuple[int, Outcome[T]]] = field(default_factory=list)
    # when the present job is late; None while there is no job or no limit
    due: float | None = None
    abandoned: bool = False

    def start(self) -> None:
        """Start the thread. It does not keep the process alive."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while self._run_batch(self.batches.get()):
            pass

    def _run_batch(self, batch: _Batch[T] | None) -> bool:
        """Run jobs and return whether to go on. A thread that waits refers to no job, and so to no environment."""
        if batch is None:
            return False
        with self.lock:
            self.batch, self.outcomes, self.due = batch, [], _due(batch)
        for number, job in batch.jobs:
            outcome: Outcome[T]
            try:
                outcome = job()
            # even an exit fails its own job only
            except BaseException as error:
                outcome = error
            with self.lock:
                if self.abandoned:
                    return False
                self.outcomes.append((number, outcome))
                self.due = _due(batch)
        with self.lock:
            self.due = None
            outcomes, self.batch, self.outcomes = self.outcomes, _Batch(), []
        self.finished.put(outcomes)
        return True

    def abandon_late(self) -> _Thread[T] | None:
        """Abandon the thread if its job takes too long; return the thread that takes over its other jobs."""
        with self.lock:
            if self.due is None or time.monotonic() < self.due:
                return None
            if len(self.outcomes) == len(self.batch.jobs):
                return None
            self.abandoned = True
        (late, _), *others = self.batch.jobs[len(self.outcomes) :]
        limit = TimeLimitExceeded(f"the environment took longer than {self.batch.timeout_s:g} s")
        self.finished.put([*self.outcomes, (late, limit)])
        successor = _Thread(self.finished)
        successor.batches.put(_Batch(others, self.batch.timeout_s))
        while not self.batches.empty():
            successor.batches.put(self.batches.get())
        return successor


class EnvironmentWorkers(Generic[T]):
    """Run jobs of environments, each in the thread of its environment.

    A job goes QUEUED → RUNNING → ENDED with its outcome, or RUNNING → LATE with `TimeLimitExceeded`. The thread of a
    late job is abandoned, and a new one takes over the jobs queued behind it. Jobs of a thread that
    were submitted together are returned together.

    Args:
        count: Number of threads. A single one without a time limit is the caller's.
        timeout_s: Longest time of a job in seconds; None for no limit.

    Example:
        Two threads, the second job hangs::

            workers = EnvironmentWorkers(2, timeout_s=1.0)
            workers.submit([(0, step), (1, hang), (1, step)])  # [0, 1, 2]; 0 and 1 RUNNING, 2 QUEUED behind 1
            workers.collect()  # [(0, outcome)]
            workers.collect()  # [(1, TimeLimitExceeded)] after a second; 2 RUNNING in a new thread
            workers.collect()  # [(2, outcome)]
    """

    def __init__(self, count: int, *, timeout_s: float | None) -> None:
        self.count, self.timeout_s = count, timeout_s
        self._finished: queue.SimpleQueue[list[tuple[int, Outcome[T]]]] = queue.SimpleQueue()
        self._threads: dict[int, _Thread[T]] = {}
        self._numbers = count_up()
        weakref.finalize(self, _end, self._threads)

    def submit(
        self, jobs: Sequence[tuple[int, Job[T]]], *, time_limit_factor: float = 1.0
    ) -> list[int]:
        """Queue jobs and return their numbers.

        Args:
            jobs: Number of each job's thread, and the job. Threads beyond `count` begin again at the first.
            time_limit_factor: Factor of the time limit for these jobs.
        """
        numbers = list(islice(self._numbers, len(jobs)))
        batches: dict[int, list[tuple[int, Job[T]]]] = {}
        for number, (thread, job) in zip(numbers, jobs, strict=True):
            batches.setdefault(thread % self.count, []).append((number, job))
        if self.count == 1 and self.timeout_s is None:
            for batch in batches.values():
                self._finished.put([(number, _outcome(job)) for number, job in batch])
            return numbers
        for thread, batch in batches.items():
            if thread not in self._threads:
                self._threads[thread] = _Thread(self._finished)
                self._threads[thread].start()
            limit = None if self.timeout_s is None else time_limit_factor * self.timeout_s
            self._threads[thread].batches.put(_Batch(batch, limit))
        return numbers

    def collect(self, *, wait_s: float | None = None) -> list[tuple[int, Outcome[T]]]:
        """Return the jobs that have ended since the last call, each with its outcome.

        A job over the time limit ends with `TimeLimitExceeded`.

        Args:
            wait_s: Longest time to wait for the first one in seconds; None waits until there is one.
        """
        until = None if wait_s is None else time.monotonic() + wait_s
        ended: list[tuple[int, Outcome[T]]] = []
        while not ended:
            self._abandon_late()
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                ended += self._finished.get(timeout=self._tick(left))
            except queue.Empty:
                if left == 0.0:
                    break
        while not self._finished.empty():
            ended += self._finished.get()
        return ended

    def run(
        self, jobs: Sequence[tuple[int, Job[T]]], *, time_limit_factor: float = 1.0
    ) -> list[Outcome[T]]:
        """Run jobs and return their outcomes in order; the outcomes of others under way are dropped.

        Args:
            jobs: As those of `submit`.
            time_limit_factor: Factor of the time limit for these jobs.
        """
        numbers = self.submit(jobs, time_limit_factor=time_limit_factor)
        outcomes: dict[int, Outcome[T]] = {}
        while not outcomes.keys() >= set(numbers):
            outcomes.update(self.collect())
        return [outcomes[number] for number in numbers]

    def _abandon_late(self) -> None:
        for number, thread in self._threads.items():
            successor = thread.abandon_late()
            if successor is not None:
                self._threads[number] = successor
                successor.start()

    def _tick(self, left: float | None) -> float | None:
        """Return the seconds until a job may be late or the caller wants to go on, the earlier of both."""
        ticks = [] if left is None else [left]
        if self.timeout_s is not None:
            now = time.monotonic()
            dues = [thread.due for thread in self._threads.values()]
            ticks.append(self.timeout_s)
            ticks += [max(0.001, due - now) for due in dues if due is not None]
        return min(ticks, default=None)


def _due(batch: _Batch[T]) -> float | None:
    """Return when a job of this batch that begins now is late."""
    return None if batch.timeout_s is None else time.monotonic() + batch.timeout_s


def _outcome(job: Job[T]) -> Outcome[T]:
    try:
        return job()
    except Exception as error:
        return error
    # a plain exit is the environment's; a signal that ends the run raises a class of its own
    except SystemExit as error:
        if type(error) is not SystemExit:
            raise
        return error


def _end(threads: dict[int, _Thread[T]]) -> None:
    """End the threads once they have run their jobs."""
    for thread in threads.values():
        thread.batches.put(None)
