"""Tells the other ranks where this one is, so that a rank that does not go on is named."""

from __future__ import annotations

import lightning.pytorch as pl

from ragen_pl.loops.hooks import Moment, RolloutCallback
from ragen_pl.loops.rollout_update import rollout_loop
from ragen_pl.ranks import ranks

_STEPS = {
    "rollout": "rollout, {done} of {total} episodes done",
    "preparation": "after the rollout",
    "update": "minibatch {done}",
    "validation": "validation, batch {done}",
}


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

    def on_phase(
        self, trainer: pl.Trainer, phase: str, moment: Moment, done: int, total: int
    ) -> None:
        """Note it."""
        if moment == "step" or phase == "preparation":
            self._moved(trainer, _STEPS[phase].format(done=done, total=total))
        elif trainer.world_size > 1:
            ends = (phase, moment) == ("rollout", "end")
            ranks.enter_phase(
                self._label(trainer, moment if phase == "training" else f"{moment} of the {phase}"),
                count=trainer.world_size,
                limit_s=self.rollout_timeout_s if ends else self.timeout_s,
                stall_s=self.stall_s,
            )

    def _moved(self, trainer: pl.Trainer, place: str) -> None:
        if trainer.world_size > 1:
            ranks.heartbeat(self._label(trainer, place), stall_s=self.stall_s)

    def _label(self, trainer: pl.Trainer, place: str) -> str:
        if rollout_loop(trainer) is None:
            return f"warm start, {place}"
        return f"iteration {trainer.current_epoch + 1}, {place}"

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        """Note that a checkpoint is written."""
        self._moved(trainer, "checkpoint")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Suspend the limits after training."""
        ranks.suspend_limits()
