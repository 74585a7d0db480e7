"""Whole jobs in processes of their own, which a test may kill or stop at a given moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs.module_process import run_module
from support.runs.small_runs import SMALL, run_ranks

from ragen_pl.checkpoints.sharded_checkpoint import CheckpointFiles
from ragen_pl.ranks import rank_watch
from ragen_pl.ranks.rank_watch import RankWatch

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
# a run of seconds on an idle machine; the limit is for one that hangs
LIMIT_S = 1200


@dataclass
class Job:
    """A run folder and the results in it."""

    folder: Path

    def run(
        self,
        *overrides: str,
        codes: tuple[int, ...] = (0,),
        signaled: bool = False,
        settings: tuple[str, ...] = SMALL,
        launched: bool = True,
    ) -> str:
        """Run `python -m ragen_pl.fit` in this folder, check how it ended and return its output.

        Args:
            overrides: of the config.
            codes: expected exit codes.
            signaled: whether the callback of `killing.py` must have sent its signal.
            settings: overrides before these.
            launched: whether the first of two ranks starts the other one, else both are started as torchrun does it.
        """
        overrides = (
            *(*settings, *overrides),
            f"paths.root={self.folder.parent}",
            f"paths.run_dir={self.folder}",
        )
        if "trainer.devices=2" not in overrides:
            code, output = _start(overrides, self.folder.parent)
        elif launched:
            code, output = _start_ranks(overrides, self.folder.parent)
        else:
            ended, other = run_ranks(self.folder.parent, overrides)
            code, output = ended.code, ended.output + other.output
            # one that has got a signal or fails ends the other one
            assert ended.code == other.code or codes != (0,), output[-3000:]
        assert self.note.exists() == signaled, output[-3000:]
        self.note.unlink(missing_ok=True)
        assert code in codes, output[-3000:]
        return output

    @property
    def note(self) -> Path:
        """File that a process writes before it sends itself a signal."""
        return self.folder / "killed"

    def kill_at(
        self,
        moment: str,
        *overrides: str,
        rank: int = 0,
        settings: tuple[str, ...] = SMALL,
        launched: bool = True,
    ) -> None:
        """Run until the callback of `killing.py` sends SIGKILL to one of the processes."""
        # rank 0 may outlive another rank and end with an error of its own
        codes = (-signal.SIGKILL, 1)
        ended = {"codes": codes, "signaled": True, "settings": settings, "launched": launched}
        self.run(*overrides, *signal_at(moment, rank=rank), **ended)

    def stop_at(self, moment: str, *overrides: str, rank: int = 0) -> str:
        """Run until the callback of `killing.py` sends SIGTERM to one of the processes."""
        settings = signal_at(moment, rank=rank, name="SIGTERM")
        return self.run(*overrides, *settings, codes=(143,), signaled=True)

    @property
    def steps(self) -> int:
        """Optimizer steps that the last checkpoint holds."""
        return int(self.last["global_step"])

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Weights of the last checkpoint."""
        return self.last["state_dict"]

    @property
    def last(self) -> dict[str, Any]:
        """The last checkpoint."""
        file = self.folder / "checkpoints" / "last.ckpt"
        return CheckpointFiles().load_checkpoint(file, weights_only=True)

    @property
    def metrics(self) -> dict[str, float]:
        """The run's last metrics, without times."""
        metrics = json.loads((self.folder / "metrics.json").read_text())
        return {name: value for name, value in metrics.items() if not name.startswith("time/")}

    def differs_from(self, other: Job) -> list[str]:
        """Return the names of weights and metrics in which two finished runs differ."""
        weights, metrics = other.weights, other.metrics
        assert self.weights.keys() == weights.keys() and self.metrics.keys() == metrics.keys()
        changed = [name for name, value in self.weights.items() if not value.equal(weights[name])]
        return changed + [name for name, value in self.metrics.items() if value != metrics[name]]


def _start(overrides: Sequence[str], folder: Path) -> tuple[int | None, str]:
    """Run the command of a job of one process, and return its exit code and output."""
    return run_module(
        "ragen_pl.fit", overrides,
        folder=folder, paths=(TESTS, ROOT), timeout=LIMIT_S,
    )  # fmt: skip


def _start_ranks(overrides: Sequence[str], folder: Path) -> tuple[int | None, str]:
    """Run the command of a job whose first process starts the others by the same command."""
    done = subprocess.run(
        [sys.executable, "-m", "ragen_pl.fit", *overrides],
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout


def signal_at(moment: str, *, rank: int, name: str = "SIGKILL") -> list[str]:
    """Return overrides that add the callback of `killing.py`."""
    return [
        "+callbacks.kill._target_=support.runs.killing.KillAt",
        f"+callbacks.kill.moment={moment}",
        f"+callbacks.kill.rank={rank}",
        f"+callbacks.kill.signal_name={name}",
    ]


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    """Return a function that makes a job in a new folder."""

    def make() -> Job:
        return Job(tmp_path_factory.mktemp("run") / "here")

    return make


class Store:
    """The meeting place of ranks in one process."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.kept: str | None = None

    def publish(self, port: int, token: str) -> None:
        self.kept = f"127.0.0.1:{port}:{token}"

    def address(self) -> str:
        if self.kept is None:
            raise OSError("not there yet")
        return self.kept


@pytest.fixture
def watches(monkeypatch):
    """Return a function that makes the watches of ranks 0 to N - 1, which may exit."""
    # they must not end the process of the tests where it is slow
    monkeypatch.setattr(rank_watch, "_END_S", 600.0)
    made: list[RankWatch] = []

    def make(count: int, *, first: int = 0, **more: str | bool) -> list[RankWatch]:
        settings = {"count": count, "meeting": Store(), **more}
        # a rank may look for the first one before it is there
        numbers = range(first + count - 1, first - 1, -1)
        # the main thread of this process is not theirs
        with ThreadPoolExecutor(1) as thread:
            made.extend(thread.map(lambda number: RankWatch(number, **settings), numbers))
        return sorted(made, key=lambda watch: watch.rank)

    yield make
    for watch in made:
        watch.leave()
    # the first rank waits for the others
    for watch in sorted(made, key=lambda watch: -watch.rank):
        watch.close()
