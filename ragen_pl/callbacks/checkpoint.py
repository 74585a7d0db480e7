"""RunCheckpoint: Lightning's ModelCheckpoint, whose last.ckpt is of the run's last iteration too."""

from __future__ import annotations

import lightning.pytorch as pl


class RunCheckpoint(pl.callbacks.ModelCheckpoint):
    """Save every so many iterations, and at the end of a run whatever that number is.

    `last.ckpt` is one file: it is written over, also by a run that was resumed from another checkpoint.
    """

    def __init__(self, **settings: object) -> None:
        super().__init__(**{"save_last": True, "enable_version_counter": False, **settings})  # type: ignore[arg-type]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save where it is time to, and in the last iteration."""
        super().on_train_epoch_end(trainer, pl_module)
        if (
            self.save_last
            and self._last_global_step_saved != trainer.global_step
            and _ends(trainer)
        ):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))


def _ends(trainer: pl.Trainer) -> bool:
    most = trainer.max_epochs
    by_steps = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
    return (
        trainer.should_stop
        or by_steps
        or (most not in (None, -1) and trainer.current_epoch + 1 >= most)
    )
