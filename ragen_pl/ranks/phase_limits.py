"""Tells the other ranks where this one is, so that a rank that does not go on is named."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl

from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.loops.rollout_update import RolloutUpdateLoop
from ragen_pl.ranks import ranks
from ragen_pl.trajectory import Trajectory


class PhaseLimits(RolloutCallback):
    """Note each change of phase and each step of work, on several ranks. It waits for no rank.

    Args:
        timeout_s: Seconds that a rank waits for another one at a change of phase.
        rollout_timeout_s: The same at the end of a rollout; None for `timeout_s`.
        stall_s: Seconds after which a rank in which nothing happens prints its stacks and ends the run; None for no
            limit.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        rollout_timeout_s: float | None = None,
        stall_s: float | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.rollout_timeout_s = timeout_s if rollout_timeout_s is None else rollout_timeout_s
        self.stall_s = float("inf") if stall_s is None else stall_s

    def _reached(self, trainer: pl.Trainer, place: str, *, limit_s: float | None = None) -> None:
        if trainer.world_size > 1:
            ranks.enter_phase(
                self._label(trainer, place),
                count=trainer.world_size,
                limit_s=self.timeout_s if limit_s is None else limit_s,
                stall_s=self.stall_s,
            )

    def _moved(self, trainer: pl.Trainer, place: str) -> None:
        if trainer.world_size > 1:
            ranks.heartbeat(self._label(trainer, place), stall_s=self.stall_s)

    def _label(self, trainer: pl.Trainer, place: str) -> str:
        if not isinstance(trainer.fit_loop, RolloutUpdateLoop):
            return f"warm start, {place}"
        return f"iteration {trainer.current_epoch + 1}, {place}"

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the start."""
        self._reached(trainer, "start")

    def on_rollout_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the start of a rollout."""
        self._reached(trainer, "start of the rollout")

    def on_rollout_progress(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, done: int, total: int
    ) -> None:
        """Note a turn, or the end of a rollout."""
        if done == total:
            self._reached(trainer, "end of the rollout", limit_s=self.rollout_timeout_s)
        else:
            self._moved(trainer, f"rollout, {done} of {total} episodes done")

    def on_rollout_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        trajectories: Sequence[Trajectory],
    ) -> None:
        """Note that the samples are prepared."""
        self._moved(trainer, "after the rollout")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the start of an update."""
        self._reached(trainer, "start of the update")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Note a minibatch."""
        self._moved(trainer, f"minibatch {batch_idx + 1}")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the end of an update."""
        self._reached(trainer, "end of the update")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the start of a validation."""
        self._reached(trainer, "start of the validation")

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note a batch of episodes."""
        self._moved(trainer, f"validation, batch {batch_idx + 1}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the end of a validation."""
        self._reached(trainer, "end of the validation")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        """Note that a checkpoint is written."""
        self._moved(trainer, "checkpoint")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Suspend the limits after training."""
        ranks.suspend_limits()
