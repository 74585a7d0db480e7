"""Trainers in processes of their own that take their steps in turn, timed by each clock."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from timing import CLOCKS, Stopwatch

from ragen_pl.trajectory import Trajectory

Record = dict[str, float]
"""Seconds of a step by each clock (`wall`, `cpu`) and of its rollout (`rollout, wall`), its `tokens` and `turns`."""


class Side:
    """A trainer in another process, which waits before each step. Its standard error is this process's.

    Args:
        name: Name in errors.
        command: Arguments of Python.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self) -> Record:
        """Let it take a step."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # what it has printed ends below
        for line in self.process.stdout:
            if line.startswith("{"):
                record: Record = json.loads(line)
                return record
        raise SystemExit(f"the process of {self.name} has ended; its error is above")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


class Meter:
    """The other end of `Side`: times the steps of this process, and waits between them."""

    def __init__(self) -> None:
        self.watches = {name: Stopwatch(clock) for name, clock in CLOCKS.items()}
        self.counts = {"tokens": 0, "turns": 0}
        self.began: dict[str, float] | None = None

    def pause(self) -> None:
        """Report the step that has ended, wait for a line, and start the time of the next step."""
        if self.began is not None:
            record: Record = dict(self.counts)
            for name, watch in self.watches.items():
                record[name] = watch.clock() - self.began[name]
                record |= {f"{part}, {name}": spent for part, spent in watch.take().items()}
            print(json.dumps(record), flush=True)
        if not sys.stdin.readline():
            raise SystemExit("the process that asks for steps has ended")
        self.began = {name: watch.clock() for name, watch in self.watches.items()}

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Time the rollout of a step."""
        with self.watches["wall"].timed("rollout"), self.watches["cpu"].timed("rollout"):
            yield

    def note(self, trajectories: Sequence[Trajectory]) -> None:
        """Count the sampled tokens and turns of a step."""
        responses = [turn.response_ids for trajectory in trajectories for turn in trajectory.turns]
        self.counts = {"tokens": sum(map(len, responses)), "turns": len(responses)}
