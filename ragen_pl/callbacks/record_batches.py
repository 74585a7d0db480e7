"""RecordBatches: keep an optimizer step of some iterations, which `ragen_pl.replay` repeats, for bug reports."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count
from ragen_pl.base.seeding import random_state
from ragen_pl.callbacks.access import run_folder
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.modules.optimized import OptimizedModule

FOLDER = "batches"
"""Folder in the run's one."""


class RecordBatches(RolloutCallback):
    """Record the first optimizer step of every n-th iteration, with the weights before it, in `<run>/batches`.

    The run is bit for bit the run without.

    Args:
        every_n_iterations: Interval in iterations, from the first on; None for none.
    """

    needs_trust = ()

    @checked
    def __init__(self, *, every_n_iterations: Count | None = None) -> None:
        self.every_n_iterations = every_n_iterations

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the step that begins, on all ranks."""
        interval = self.every_n_iterations
        if interval is None or batch_idx or trainer.current_epoch % interval:
            return
        from ragen_pl.modules.recording import minibatches_of_step, present_step, record

        assert isinstance(pl_module, OptimizedModule)
        last = trainer.accumulate_grad_batches - 1
        numbers = minibatches_of_step(pl_module, last)
        step = present_step(pl_module, numbers, random={batch_idx: random_state()})
        if step is not None:
            record(pl_module, step, run_folder(trainer) / FOLDER)
