"""torch's random state in checkpoints."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor

from ragen_pl.base.distributed import gather_over_ranks, rank, world_size


class RandomState(pl.Callback):
    """Save torch's random state, and continue from it after a resume.

    For a Trainer whose steps are not seeded one by one, such as the warm start's.
    """

    def __init__(self) -> None:
        self._restored: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, list[dict[str, Tensor]]]:
        """Return the random states of all ranks."""
        states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        return {"ranks": gather_over_ranks(states)}

    def load_state_dict(self, state_dict: dict[str, list[dict[str, Tensor]]]) -> None:
        """Keep this rank's state for the next training step."""
        ranks = state_dict["ranks"]
        self._restored = ranks[rank()] if len(ranks) == world_size() else {}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Restore the state once, after all that a start draws."""
        if "cpu" in self._restored:
            torch.set_rng_state(self._restored["cpu"])
        if "cuda" in self._restored and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(self._restored["cuda"])
        self._restored = {}
