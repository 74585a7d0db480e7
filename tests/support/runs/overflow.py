"""A callback for the tests of `ragen_pl.replay`, which makes a layer overflow."""

from __future__ import annotations

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
