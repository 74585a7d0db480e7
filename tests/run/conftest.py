"""Whole jobs in processes of their own, killed where a test wants it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SMALL = (
    "env=frozenlake",
    "++model.build.text.hidden_size=32",
    "++model.build.text.intermediate_size=64",
    "++model.build.text.num_attention_heads=2",
    "++model.build.text.num_key_value_heads=2",
    "env.invalid_ends=false",
    "env.max_turns=3",
    "env.kwargs.min_distance=1",
    "curriculum=null",
    "rollout.groups=8",
    "rollout.max_response_tokens=16",
    "validation.episodes=16",
    "warm_start.steps=60",
    "warm_start.episodes=64",
    "warm_start.optimizer.lr=1e-2",
    "trainer.max_epochs=3",
    "trainer.check_val_every_n_epoch=1",
    "logger=none",
    "callbacks.progress=null",
    "callbacks.trajectories=null",
)


@dataclass
class Job:
    """A run folder and what was found in it."""

    folder: Path

    def run(self, *overrides: str, killed: bool = False) -> None:
        """Run `python -m ragen_pl.fit` in this folder and check that it ended as expected."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "ragen_pl.fit", *SMALL, *overrides),
                f"paths.root={self.folder.parent}",
                f"paths.run_dir={self.folder}",
            ],
            env=os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
            cwd=self.folder.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert self.note.exists() == killed, done.stderr[-3000:]
        self.note.unlink(missing_ok=True)
        # rank 0 may outlive another rank for long enough to end with an error of its own
        expected = (-signal.SIGKILL, 1) if killed else (0,)
        assert done.returncode in expected, done.stderr[-3000:]

    @property
    def note(self) -> Path:
        """What a process writes before it kills itself."""
        return self.folder / "killed"

    def kill_at(self, moment: str, *overrides: str, rank: int = 0) -> None:
        """Run until the callback of `killing.py` kills one of the processes."""
        self.run(
            *overrides,
            "+callbacks.kill._target_=killing.KillAt",
            f"+callbacks.kill.moment={moment}",
            f"+callbacks.kill.rank={rank}",
            killed=True,
        )

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The last checkpoint's weights."""
        last = self.folder / "checkpoints" / "last.ckpt"
        return torch.load(last, weights_only=True)["state_dict"]

    @property
    def metrics(self) -> dict[str, float]:
        """The run's last metrics, but for its times."""
        found = json.loads((self.folder / "metrics.json").read_text())
        return {name: value for name, value in found.items() if not name.startswith("time/")}

    def differs_from(self, other: Job) -> list[str]:
        """Return the weights and metrics in which two finished runs differ."""
        mine, theirs = self.weights, other.weights
        assert mine.keys() == theirs.keys() and self.metrics.keys() == other.metrics.keys()
        return [name for name in mine if not torch.equal(mine[name], theirs[name])] + [
            name for name, value in self.metrics.items() if value != other.metrics[name]
        ]


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    """Return a maker of jobs in new folders."""

    def make() -> Job:
        return Job(tmp_path_factory.mktemp("run") / "here")

    return make
