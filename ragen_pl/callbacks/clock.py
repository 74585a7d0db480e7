"""RunClock: the one clock of a run's phases. It tells callbacks of them and writes their seconds into the record."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from ragen_pl.base.machine import resident_memory
from ragen_pl.callbacks.access import RecordsMetrics, callbacks_of, record_logger
from ragen_pl.loops.hooks import Moment, RolloutCallback
from ragen_pl.loops.rollout_update import rollout_loop
from ragen_pl.metrics.record import ELAPSED, TRAINING, VALIDATION, WARM_START, RecordReader

_GIB = 2.0**30


class RunClock(RolloutCallback):
    """Measure the phases of an iteration, and tell all callbacks when one begins, goes on and ends.

    Each hook assigns the time since the last one to the phase that ends. At the end of an iteration the seconds go into
    the run's record, with the memory in use. Checkpoints hold the place in the record: a resumed run goes on from it.
    """

    def __init__(self) -> None:
        self.elapsed = 0.0
        # until when the time has been assigned, and the seconds by phase of the current iteration
        self._mark = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._updating = False
        # number of points in the record that a checkpoint knows
        self._count: int | None = None
        # the step that has ended last, whose point may follow the checkpoint
        self._step: int | None = None
        self._logger: RecordsMetrics | None = None

    def _tell(
        self, trainer: pl.Trainer, phase: str, moment: Moment, done: int = 0, total: int = 0
    ) -> None:
        for callback in callbacks_of(trainer, RolloutCallback):
            callback.on_phase(trainer, phase, moment, done, total)

    def _assign(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
        self.elapsed += now - self._mark
        self._mark = now

    def _end_update(self) -> None:
        self._assign("update" if self._updating else "other")
        self._updating = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the run's record, which rank 0 writes."""
        self._logger = record_logger(trainer)

    # ---- hooks in the order of an iteration

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock, and go on in the record where the checkpoint was written."""
        self._mark, self._updating = time.perf_counter(), False
        if self._logger is not None:
            self._continue(trainer, self._logger)
        self._tell(trainer, "training", "start")

    def _continue(self, trainer: pl.Trainer, logger: RecordsMetrics) -> None:
        record, learns = logger.record, rollout_loop(trainer) is None
        record.phase = WARM_START if learns else TRAINING
        count = self._count
        if count is None:
            # no checkpoint, or one of an earlier version
            done = trainer.global_step - 1 if learns else trainer.current_epoch
            resumed = trainer.global_step > 0 or trainer.current_epoch > 0
            count = record.count_until(done if resumed else None, phase=record.phase)
        elif learns and self._step is not None:
            count = max(count, record.count_until(self._step, phase=record.phase))
        logger.keep(count)
        rows = [] if learns or self.elapsed else RecordReader(record.folder).rows()
        self.elapsed = rows[-1][ELAPSED] if rows else self.elapsed

    def on_rollout_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a rollout."""
        self._assign("other")
        self._tell(trainer, "rollout", "start")

    def on_rollout_progress(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, done: int, total: int
    ) -> None:
        """Tell of a turn, or of the end of the play."""
        self._tell(trainer, "rollout", "end" if done == total else "step", done, total)

    def on_rollout_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, trajectories: object
    ) -> None:
        """End the rollout, with the preparation of its samples."""
        self._assign("rollout")
        self._tell(trainer, "preparation", "end")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin an update."""
        self._assign("other")
        self._tell(trainer, "update", "start")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Tell of a minibatch."""
        self._updating = True
        self._tell(trainer, "update", "step", batch_idx + 1, int(trainer.num_training_batches))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: object
    ) -> None:
        """Note the step. Its metrics are logged after the hooks, one of which may write a checkpoint."""
        self._step = trainer.fit_loop.epoch_loop._batches_that_stepped

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a validation."""
        self._end_update()
        if self._logger is not None:
            self._logger.record.phase = VALIDATION
        self._tell(trainer, "validation", "start")

    def on_validation_batch_start(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Tell of a batch of episodes."""
        self._tell(trainer, "validation", "step", batch_idx + 1)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End a validation. One before the first iteration has a point of its own."""
        self._assign("validation")
        if self._logger is not None:
            self._logger.record.phase = TRAINING
        fits = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if fits and trainer.global_step == 0 and "rollout" not in self._seconds:
            self._add_seconds(trainer, 0)
        self._tell(trainer, "validation", "end")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End an update, and with it an iteration."""
        self._end_update()
        if rollout_loop(trainer) is not None:
            self._add_seconds(trainer, trainer.current_epoch + 1)
        self._tell(trainer, "update", "end")

    def _add_seconds(self, trainer: pl.Trainer, iteration: int) -> None:
        metrics = {f"time/{phase}_s": seconds for phase, seconds in self._seconds.items()}
        self._seconds = {}
        if self._logger is not None:
            metrics |= {ELAPSED: self.elapsed} | _memory(trainer)
            self._logger.record.add(metrics, iteration, tracked=False)

    # ---- resume

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the record, whose points the disk has then, and the times."""
        count = None
        if self._updating:
            self._assign("update")
        if self._logger is not None:
            count = self._logger.record.count
            self._logger.record.synchronize()
        return {
            "count": count, "step": self._step, "seconds": dict(self._seconds), "elapsed": self.elapsed,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self._count, self.elapsed = state_dict["count"], state_dict["elapsed"]
        self._seconds = dict(state_dict["seconds"])
        # none in a checkpoint of an earlier version
        self._step = state_dict.get("step")


def _memory(trainer: pl.Trainer) -> dict[str, float]:
    """Return the memory in use by this process and the most so far on its GPU, in GiB."""
    used = resident_memory()
    memory = {} if used is None else {"memory/process_gib": used / _GIB}
    device = trainer.strategy.root_device
    if device.type == "cuda":
        memory["memory/gpu_gib"] = torch.cuda.max_memory_allocated(device) / _GIB
    return memory
