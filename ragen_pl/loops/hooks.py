"""Protocol of the rollout/update loop's DataModule, and the hooks that the loop adds to Lightning's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

import lightning.pytorch as pl

from ragen_pl.trajectory import Trajectory

Moment = Literal["start", "step", "end"]
"""Event of a phase of a run."""


@runtime_checkable
class CollectsTrajectories(Protocol):
    """A DataModule that the loop can train from."""

    seed: int

    def collect(
        self, iteration: int, module: pl.LightningModule, *, progress: Callable[[int, int], None]
    ) -> list[Trajectory]:
        """Play this rank's part of the iteration, fill the buffer and return the trajectories.

        `progress(done, total)` is called between turns, and on every rank once at the end of each
        rollout with `done == total`. It may raise `ragen_pl.base.distributed.StopRequestedError`, which has to be
        raised on all ranks then.
        """

    def has_buffer(self, iteration: int) -> bool:
        """Return whether the buffer holds this iteration's trajectories."""

    def drop_buffer(self) -> None:
        """Drop the buffer after the update."""


class RolloutCallback(pl.Callback):
    """Callback with hooks for the rollout phase. The loop calls them between Lightning's own hooks.

    Attributes:
        in_warm_start: Use this callback in the warm start's Trainer too.
    """

    in_warm_start: bool = False

    def on_rollout_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Run before the rollout phase of an iteration."""

    def on_rollout_progress(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, done: int, total: int
    ) -> None:
        """Run after each turn; `done` of this rank's `total` episodes have ended.

        Other ranks are elsewhere in their rollouts, so it may not wait for them. To stop the rollouts of all ranks it
        raises `ragen_pl.base.distributed.StopRequestedError`.
        """

    def on_rollout_stopped(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Run on all ranks, after this or another one has stopped the rollout phase. It has to end the run."""

    def on_rollout_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        trajectories: Sequence[Trajectory],
    ) -> None:
        """Run after the rollout phase with this rank's trajectories."""

    def on_phase(
        self, trainer: pl.Trainer, phase: str, moment: Moment, done: int, total: int
    ) -> None:
        """Run when a phase starts, goes on by a step, or ends, as the run's clock tells.

        The phases are `training`, which only starts, and `rollout`, `preparation` of its samples, `update` and
        `validation`. `done` is the number of episodes that have ended, of the minibatch, or of the batch of a
        validation, and `total` that of all, 0 where it is unknown.
        """

    def on_last_weights(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Run at the end of training, after `on_train_end` of all callbacks: the last weights are validated and saved.

        They are still on their device, from which the Trainer then moves them to the host.
        """
