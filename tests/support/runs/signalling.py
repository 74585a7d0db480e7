"""Components of a user's own that send this process a signal at one moment of its run, named by `SIGNAL_AT`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl

from envs.frozen_lake import FrozenLake
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.tracking.loggers import RunCSVLogger
from ragen_pl.trajectory import Trajectory

# file that plays -> what it plays for
_PLAYERS = {
    "environments/check.py": "check",
    "data/demonstrations.py": "demonstrations",
    "run/baselines.py": "baselines",
}
_sent: list[str] = []


def at(moment: str) -> None:
    """Send the signal if this is its moment, once."""
    if moment == os.environ.get("SIGNAL_AT") and not _sent:
        _sent.append(moment)
        os.kill(os.getpid(), signal.Signals[os.environ["SIGNAL"]])


def again() -> None:
    """Send SIGTERM after the first signal: a launcher may send its own several times."""
    if _sent:
        os.kill(os.getpid(), signal.SIGTERM)


def _opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and str(arguments[0]).endswith("starts.jsonl") and arguments[1] == "a":
        again()
        at("start noted")


# for the run alone: a search for tests imports this file, too, and a hook can't be removed
if "SIGNAL_AT" in os.environ:
    sys.addaudithook(_opened)


def _playing() -> str:
    """Return what the main thread plays for."""
    frame = sys._current_frames()[threading.main_thread().ident]
    while frame is not None:
        for file, player in _PLAYERS.items():
            if frame.f_code.co_filename.endswith(file):
                return player
        frame = frame.f_back
    return ""


class Lake(FrozenLake):
    """Lake whose reset is a moment."""

    def reset(self, **settings: Any) -> Any:
        """Begin an episode."""
        at(f"reset in {_playing()}")
        return super().reset(**settings)


class _Dropped:
    def __del__(self) -> None:
        at("deletion")


class Moments(RolloutCallback):
    """The moments of the Trainer."""

    in_warm_start = True
    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        at(f"constructor {self.made}")
        _Dropped()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Note the start of a Trainer."""
        at(f"setup {'warm start' if trainer.max_epochs == -1 else trainer.state.fn.value}")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        """Note a minibatch."""
        at(f"minibatch {'of warm start' if trainer.max_epochs == -1 else 'of update'}")

    def on_rollout_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, episodes: Sequence[Trajectory]
    ) -> None:
        """Note the end of a rollout."""
        at("rollout")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note a validation."""
        at("last validation" if trainer.global_step else "validation")

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """End a Trainer by another signal."""
        again()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Note the end of a Trainer."""
        at(f"teardown {'warm start' if trainer.max_epochs == -1 else trainer.state.fn.value}")


class Logger(RunCSVLogger):
    """Logger whose start and end are moments."""

    def log_hyperparams(self, params: Any) -> None:
        """Write the settings."""
        super().log_hyperparams(params)
        at("settings logged")

    def close(self) -> None:
        """End, after all phases of the run."""
        at("logger closed")
        again()
