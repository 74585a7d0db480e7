"""PlotRun: collects a row of metrics an iteration and draws them with `ragen_pl.viewing.plots`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count
from ragen_pl.base.files import atomic_write, disk_errors_of
from ragen_pl.base.json_text import json_text
from ragen_pl.base.machine import resident_memory
from ragen_pl.callbacks.access import log_files, rollout_metrics_of, run_folder, run_title
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.viewing.plots import FOLDER, ROWS, Row, draw_plots

# Of the rollout and of the validation; `reward/` is the beginning of the names of the reward's parts.
_METRICS = (
    "success", "episodes", "return", "return_std", "turns", "response_tokens", "valid_actions",
    "failed_episodes", "entropy", "curriculum_stage", "effective_actions", "overlong_responses", "turn_limit",
    "truncated", "group_return_std",
)  # fmt: skip
_PARTS = "reward/"
_UPDATE = ("approx_kl", "reference_kl", "clip_fraction", "learning_rate")
_GRADIENT = "update/gradient_norm_"
_GIB = 2.0**30


class PlotRun(RolloutCallback):
    """Keep a row of metrics an iteration and draw the rows into `<run>/plots` and MLflow's artifacts.

    Checkpoints hold the rows, so the curves of a resumed run go on. `plots/rows.jsonl` gets them as they come, so a
    killed run leaves it.

    Args:
        every_n_iterations: iterations between two drawings; the end of a run always draws.
    """

    needs_trust = ()

    @checked
    def __init__(self, *, every_n_iterations: Count = 20) -> None:
        self.every_n_iterations = every_n_iterations
        self.rows: list[Row] = []
        self._file = RowsFile()
        # Until when the time has been assigned to a phase, and the time of the run up to then, including
        # the parts of the run before a resume.
        self._mark = time.perf_counter()
        self._elapsed = 0.0
        # Seconds by phase and the validation's metrics, of the current iteration.
        self._seconds: dict[str, float] = {}
        self._validation: Row = {}
        self._updating = False
        self._trainer: pl.Trainer | None = None

    # ---- time by phase: each hook assigns the time since the last hook to the phase that ends

    def _assign_time(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
        self._elapsed += now - self._mark
        self._mark = now

    def _end_update(self) -> None:
        self._assign_time("update" if self._updating else "other")
        self._updating = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._trainer = trainer
        self._mark, self._updating = time.perf_counter(), False

    def on_rollout_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the time before the rollout phase, and complete the row of the iteration before."""
        self._assign_time("other")
        self._add_update(trainer)
        if trainer.is_global_zero:
            self._write(run_folder(trainer) / FOLDER)

    def on_rollout_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, trajectories: object
    ) -> None:
        """End the rollout phase."""
        self._assign_time("rollout")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the time between the phases."""
        self._assign_time("other")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Start the update phase."""
        self._updating = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the phase before the validation."""
        self._end_update()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the validation.

        Its metrics go into the iteration's row. A validation before the first iteration has a row of its own;
        one after the fit measures the last weights and changes the last row.
        """
        self._assign_time("validation")
        if trainer.sanity_checking:
            return
        metrics = _plotted("val", trainer.callback_metrics)
        if trainer.state.fn == TrainerFn.VALIDATING:
            if self.rows:
                self.rows[-1] |= metrics
                self._publish(trainer)
            return
        self._validation = metrics
        if not self.rows and not self._seconds.get("rollout"):
            self._add_row(trainer, 0, {})

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the iteration's row."""
        self._end_update()
        iteration = trainer.current_epoch + 1
        rollout = {f"rollout/{name}": value for name, value in rollout_metrics_of(trainer).items()}
        self._add_row(trainer, iteration, _plotted("rollout", rollout))
        if iteration % self.every_n_iterations == 0:
            self._publish(trainer)

    def _add_row(self, trainer: pl.Trainer, iteration: int, metrics: Row) -> None:
        times = {f"time/{phase}_s": seconds for phase, seconds in self._seconds.items()}
        row = {"iteration": float(iteration), "elapsed_s": self._elapsed}
        self.rows.append(row | metrics | self._validation | times | _memory(trainer))
        self._seconds, self._validation = {}, {}
        if trainer.is_global_zero:
            self._write(run_folder(trainer) / FOLDER)

    def _add_update(self, trainer: pl.Trainer) -> None:
        """Add the update's metrics to the last row: the module logs them after this callback has added it."""
        if self.rows:
            metrics = trainer.callback_metrics
            self.rows[-1] |= _plotted("update", metrics, _UPDATE)
            norms = {name: float(metrics[name]) for name in metrics if name.startswith(_GRADIENT)}
            self.rows[-1] |= norms

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file.write(folder / ROWS, self.rows)

    # ---- drawing

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Complete the last row."""
        self._add_update(trainer)
        self._trainer = None

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the whole run."""
        self._publish(trainer)

    def _publish(self, trainer: pl.Trainer) -> None:
        """Write and draw the rows so far and log the plots, on rank 0."""
        if not trainer.is_global_zero:
            return
        folder = run_folder(trainer) / FOLDER
        self._write(folder)
        files = draw_plots(self.rows, folder, title=run_title(trainer))
        for file in files:
            log_files(trainer, file, place=FOLDER)

    # ---- resume

    def state_dict(self) -> dict[str, Any]:
        """Return the rows and the state of the current iteration."""
        if self._trainer is not None:  # a checkpoint at the end of an iteration
            self._add_update(self._trainer)
        return {
            "rows": [dict(row) for row in self.rows],
            "seconds": dict(self._seconds),
            "validation": dict(self._validation),
            "elapsed": self._elapsed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.rows, self._file = [dict(row) for row in state_dict["rows"]], RowsFile()
        self._seconds = dict(state_dict["seconds"])
        self._validation = dict(state_dict["validation"])
        self._elapsed = state_dict["elapsed"]


class RowsFile:
    """The file of a process's rows. All but the last one stay as they are, and are written once.

    The first write replaces the file of an earlier process.
    """

    def __init__(self) -> None:
        # rows that stay, and where they end in the file
        self._kept = self._end = 0

    def write(self, file: Path, rows: Sequence[Row]) -> None:
        """Write the rows that are new, and the last one of before, which may have changed."""
        lines = [f"{json_text(row)}\n".encode() for row in rows[self._kept :]]
        if self._kept:
            with disk_errors_of(file), file.open("r+b") as stream:
                stream.seek(self._end)
                stream.write(b"".join(lines))
                stream.truncate()
        else:
            with atomic_write(file) as partial:
                partial.write_bytes(b"".join(lines))
        self._end += sum(map(len, lines[:-1]))
        self._kept += len(lines[:-1])


def _memory(trainer: pl.Trainer) -> Row:
    """Return the memory in use by this process and the most so far on its GPU, in GiB."""
    used = resident_memory()
    row = {} if used is None else {"memory/process_gib": used / _GIB}
    device = trainer.strategy.root_device
    if device.type == "cuda":
        row["memory/gpu_gib"] = torch.cuda.max_memory_allocated(device) / _GIB
    return row


def _plotted(prefix: str, metrics: Mapping[str, Any], plotted: Sequence[str] = _METRICS) -> Row:
    """Return the metrics with a prefix that are plotted."""
    names = [f"{prefix}/{name}" for name in plotted]
    names += [name for name in metrics if name.startswith(f"{prefix}/{_PARTS}")]
    return {name: float(metrics[name]) for name in names if name in metrics}
