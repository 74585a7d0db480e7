"""Callbacks that fail."""

import lightning.pytorch as pl
from support.episodes.unprintable import StrRaises


class Fails(pl.Callback):
    """Raises an error that can't be shown."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        raise StrRaises
