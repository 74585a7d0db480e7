"""SoakMeter: what a run occupies, every few iterations, as a line of JSON."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sqlite3
import threading
from pathlib import Path

import lightning.pytorch as pl
import psutil

from ragen_pl.loops.hooks import RolloutCallback


class SoakMeter(RolloutCallback):
    """Measure this process and its children before a rollout, once it has started what rollouts and validations need.

    Memory is what is in use; `kept` is what the allocator has kept of what was freed.

    Args:
        file: Gets a line for each measurement.
        store: MLflow's sqlite file.
        shared: Folder in shared memory that the run uses.
        every_n_iterations: Iterations between two measurements.
    """

    def __init__(self, *, file: str, store: str, shared: str, every_n_iterations: int = 10) -> None:
        self.file, self.store, self.shared = Path(file), Path(store), Path(shared)
        self.every_n_iterations, self.has_begun, self._first = every_n_iterations, False, 0

    def on_rollout_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.has_begun and trainer.current_epoch % self.every_n_iterations == 0:
            self.measure(trainer.current_epoch)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.has_begun = trainer.current_epoch > self._first

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first = trainer.current_epoch

    def measure(self, iteration: int) -> None:
        """Append a measurement."""
        gc.collect()
        process = psutil.Process()
        before = process.memory_full_info().uss
        # glibc keeps 10 to 30 MiB of what is freed, in which a growth would be hard to see
        ctypes.CDLL(None).malloc_trim(0)
        memory = process.memory_full_info().uss
        children = process.children(recursive=True)
        line = {
            "iteration": iteration,
            "process": os.getpid(),
            "memory": memory,
            "kept": before - memory,
            "memory_of_children": sum(child.memory_full_info().uss for child in children),
            "children": len(children),
            "objects": len(gc.get_objects()),
            "threads": threading.active_count(),
            "descriptors": process.num_fds(),
            "shared": sum(file.stat().st_size for file in self.shared.rglob("*")),
            "database": self.store.stat().st_size,
            "points": _points(self.store),
        }
        with self.file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


def _points(store: Path) -> int:
    connection = sqlite3.connect(f"file:{store}?mode=ro", uri=True, timeout=60)
    try:
        return int(connection.execute("SELECT COUNT(*) FROM metrics").fetchone()[0])
    finally:
        connection.close()
