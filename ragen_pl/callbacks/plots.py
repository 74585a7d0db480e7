"""Plots of a run while it goes on and at its end; the drawing is in `ragen_pl.viewing.plots`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.trainer.states import TrainerFn

from ragen_pl.files import atomic_write
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.viewing.plots import Row, draw_plots

FOLDER = "plots"
ROWS = "rows.jsonl"
_KEPT = ("success", "episodes", "return")


class PlotRun(RolloutCallback):
    """Keep a row of metrics an iteration and draw them into `<run>/plots`, and into MLflow's artifacts.

    Rows are in the checkpoint, so that the curves of a resumed run go on, and in `plots/rows.jsonl`,
    renewed every iteration, so that a killed run leaves them.

    Args:
        every_n_iterations: iterations from one drawing to the next; the end always draws.
    """

    def __init__(self, *, every_n_iterations: int = 20) -> None:
        if every_n_iterations < 1:
            raise ValueError(f"every_n_iterations={every_n_iterations}: expected at least 1")
        self.every_n_iterations = every_n_iterations
        self.rows: list[Row] = []
        self._mark = time.perf_counter()  # when what has been timed so far ended
        self._spent: dict[str, float] = {}
        self._measured: Row = {}  # the validation of the iteration under way
        self._updating = False
        self._elapsed = 0.0  # of earlier parts of the run and of this one, up to the mark

    # ---- time by phase: each hook gives the time since the last one to the phase that it ends

    def _charge(self, phase: str) -> None:
        now = time.perf_counter()
        self._spent[phase] = self._spent.get(phase, 0.0) + now - self._mark
        self._elapsed += now - self._mark
        self._mark = now

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin the clock, where an earlier part of the run left it."""
        self._mark, self._updating = time.perf_counter(), False

    def on_rollout_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End what came before the rollout phase."""
        self._charge("other")

    def on_rollout_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, trajectories: object
    ) -> None:
        """End the rollout phase."""
        self._charge("rollout")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End what came between the phases."""
        self._charge("other")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Note that the update is under way."""
        self._updating = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End what came before the validation."""
        self._charge("update" if self._updating else "other")
        self._updating = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End the validation; one outside an iteration has a row of its own, or the last row."""
        self._charge("validation")
        if trainer.sanity_checking:
            return
        if trainer.state.fn == TrainerFn.VALIDATING:  # of the last weights, after the fit
            if self.rows:
                self.rows[-1] |= _figures("val", trainer.callback_metrics)
                self._publish(trainer)
            return
        self._measured = _figures("val", trainer.callback_metrics)
        if not self.rows and not self._spent.get("rollout"):
            self._note(trainer, 0, {})

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the iteration."""
        self._charge("update" if self._updating else "other")
        self._updating = False
        collected = getattr(getattr(trainer, "datamodule", None), "metrics", {})
        metrics = _figures("rollout", {f"rollout/{name}": one for name, one in collected.items()})
        self._note(trainer, trainer.current_epoch + 1, metrics)
        if (trainer.current_epoch + 1) % self.every_n_iterations == 0:
            self._publish(trainer)

    def _note(self, trainer: pl.Trainer, iteration: int, metrics: Row) -> None:
        times = {f"time/{phase}_s": seconds for phase, seconds in self._spent.items()}
        row = {"iteration": float(iteration), "elapsed_s": self._elapsed}
        self.rows.append(row | metrics | self._measured | times)
        self._spent, self._measured = {}, {}
        if trainer.is_global_zero:
            self._write(Path(trainer.default_root_dir) / FOLDER)

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / ROWS) as file:
            file.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    # ---- drawing

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the whole run."""
        self._publish(trainer)

    def _publish(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            self._write(Path(trainer.default_root_dir) / FOLDER)
            self.draw(trainer)

    def draw(self, trainer: pl.Trainer) -> list[Path]:
        """Draw the rows so far, log the metrics and return their files."""
        run = Path(trainer.default_root_dir)
        files = draw_plots(self.rows, run / FOLDER, title="/".join(run.parts[-2:]))
        for logger in trainer.loggers:
            if isinstance(logger, MLFlowLogger):
                for file in files:
                    logger.experiment.log_artifact(logger.run_id, str(file), FOLDER)
        return files

    # ---- resume

    def state_dict(self) -> dict[str, Any]:
        """Return the rows, and what is known of the iteration under way."""
        return {
            "rows": [dict(row) for row in self.rows],
            "spent": dict(self._spent),
            "measured": dict(self._measured),
            "elapsed": self._elapsed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.rows = [dict(row) for row in state_dict["rows"]]
        self._spent, self._measured = dict(state_dict["spent"]), dict(state_dict["measured"])
        self._elapsed = state_dict["elapsed"]


def _figures(prefix: str, known: Mapping[str, Any]) -> Row:
    """Return those of the known metrics that are kept and are numbers."""
    names = [f"{prefix}/{name}" for name in _KEPT]
    found = {name: float(known[name]) for name in names if name in known}
    return {name: value for name, value in found.items() if math.isfinite(value)}
