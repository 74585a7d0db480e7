"""Callbacks for the tests of `ragen_pl.replay`: one makes a layer overflow, one saves a checkpoint inside an update."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import torch


class Overflow(pl.Callback):
    """Make a weight of a layer so large, before an optimizer step, that its output overflows.

    Args:
        layer: name of the layer in the training module.
        step: optimizer step, counted from 0.
    """

    in_warm_start = True

    def __init__(self, *, layer: str, step: int) -> None:
        self.layer, self.step = layer, step

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            with torch.no_grad():
                module.get_submodule(self.layer).weight.fill_(3e38)


class SaveAtStep(pl.Callback):
    """Save a checkpoint inside an update, after a minibatch that ends no optimizer step.

    Args:
        step: number of optimizer steps before it.
    """

    def __init__(self, *, step: int) -> None:
        self.step = step

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *arguments: object
    ) -> None:
        file = Path(trainer.default_root_dir) / "checkpoints" / "inside.ckpt"
        if trainer.global_step == self.step and not file.exists():
            trainer.strategy.barrier()
            trainer.save_checkpoint(file)
