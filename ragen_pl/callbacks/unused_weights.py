"""DDP with weights that a step may leave out, such as those of an image encoder in a step without images."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy

from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.policy import PolicyModule


class UnusedWeights(pl.Callback):
    """Have DDP find the weights that a step leaves out, where a model's image encoder is trained.

    DDP otherwise waits for their gradients and raises at the next step. `trainer.strategy` may say so itself.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Set `find_unused_parameters`, unless the strategy was given it."""
        strategy = trainer.strategy
        if isinstance(strategy, DDPStrategy) and any(map(_trains_encoder, pl_module.children())):
            strategy._ddp_kwargs.setdefault("find_unused_parameters", True)


def _trains_encoder(part: object) -> bool:
    if isinstance(part, PolicyModule):
        return part.bundle.trains_encoder
    return isinstance(part, CriticModule) and bool(part.backbone and part.backbone.trains_encoder)
