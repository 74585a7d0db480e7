"""Callbacks that fail."""

import lightning.pytorch as pl


class Fails(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        raise KeyError("of a callback")
