"""A callback that keeps time and peak of memory of each phase of a run, by the names of the memory plan."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch

from ragen_pl.loops.hooks import RolloutCallback


@dataclass
class Phase:
    """One phase of an iteration: its seconds, and most bytes of the GPU at once (0 on the CPU)."""

    seconds: float = 0.0
    peak: int = 0


class PhaseMeter(RolloutCallback):
    """Keep the phases of the last iteration, and when the last validation began and ended.

    Attributes:
        last: The meter that was made last.
        phases: `rollout`, `update` (scoring, forward and backward passes) and `optimizer step`.
        last_iteration: Time at the end of the last update.
        last_validation: Time at the start of the last validation.
        validated: Time at its end.
    """

    last: ClassVar[PhaseMeter]

    def __init__(self) -> None:
        PhaseMeter.last = self
        self.phases: dict[str, Phase] = {}
        self.last_iteration = self.last_validation = self.validated = 0.0
        self._began, self._part = 0.0, "update"

    def on_rollout_start(self, *_: Any) -> None:
        """Begin a rollout."""
        self.phases = {}
        self._begin()

    def on_rollout_end(self, *_: Any) -> None:
        """End a rollout."""
        self._end("rollout")

    def on_train_epoch_start(self, *_: Any) -> None:
        """Begin an update."""
        self._begin()

    def on_before_optimizer_step(self, *_: Any) -> None:
        """End a minibatch's passes."""
        self._end("update")
        self._part = "optimizer step"

    def on_train_batch_end(self, *_: Any) -> None:
        """End an optimizer step, or the passes of a microbatch without one."""
        self._end(self._part)
        self.last_iteration = self._began
        self._part = "update"

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin a validation."""
        self.last_validation = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """End a validation."""
        self.validated = time.perf_counter()

    def _begin(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def _end(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        phase = self.phases.setdefault(name, Phase())
        phase.seconds += time.perf_counter() - self._began
        phase.peak = max(phase.peak, peak)
        self._begin()
