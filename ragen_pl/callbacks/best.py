"""The checkpoint of the iteration whose validation set metrics were best."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint


class BestCheckpoint(ModelCheckpoint):
    """Keep the weights of the best validation as `best.ckpt`, the earliest of equals.

    It is written when the iteration ends, once its samples are dropped, so it is small and can be resumed
    from. What a validation outside an iteration says (before the first, after the last) does not count.

    Args:
        monitor: the figure that is to be high.
    """

    def __init__(self, *, monitor: str = "val/success") -> None:
        super().__init__(
            filename="best",
            monitor=monitor,
            mode="max",
            save_top_k=1,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self._measured = False

    def forget(self) -> None:
        """Forget this iteration's metrics: the weights are no longer those that were validated."""
        self._measured = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget earlier metrics."""
        self.forget()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take note that there are metrics of the present weights."""
        self._measured = self.monitor in trainer.callback_metrics

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the weights if they are the best so far."""
        if self._measured:
            super().on_train_epoch_end(trainer, pl_module)
        self._measured = False
