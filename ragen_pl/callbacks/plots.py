"""PlotRun: draws the run's record of metrics with `ragen_pl.viewing.plots`."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count
from ragen_pl.callbacks.access import log_files, record_logger, run_folder, run_title
from ragen_pl.metrics.record import RecordReader
from ragen_pl.metrics.shown import is_drawn
from ragen_pl.viewing.plots import FOLDER, draw_plots


class PlotRun(pl.Callback):
    """Draw the metrics of the iterations into `<run>/plots` and MLflow's artifacts, from the run's record.

    Args:
        every_n_iterations: Iterations between two drawings; the end of a run always draws.
    """

    needs_trust = ()

    @checked
    def __init__(self, *, every_n_iterations: Count = 20) -> None:
        self.every_n_iterations = every_n_iterations
        self._reader: RecordReader | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the record.

        Raises:
            ValueError: The Trainer keeps none.
        """
        if not trainer.is_global_zero or self._reader is not None:
            return
        logger = record_logger(trainer)
        if logger is None:
            raise ValueError(
                "PlotRun draws the run's record: give the Trainer a logger that writes it, such as "
                "ragen_pl.tracking.loggers.RecordLogger(run_dir=…), and ragen_pl.callbacks.clock.RunClock()"
            )
        self._reader = RecordReader(logger.record.folder, only=is_drawn)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the iterations before this one, if they are as many."""
        done = trainer.current_epoch
        if done and done % self.every_n_iterations == 0:
            self._draw(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw again after a validation that follows a fit."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._draw(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the whole run."""
        self._draw(trainer)

    def _draw(self, trainer: pl.Trainer) -> None:
        if self._reader is not None:
            files = draw_plots(
                self._reader.rows(), run_folder(trainer) / FOLDER, title=run_title(trainer)
            )
            for file in files:
                log_files(trainer, file, place=FOLDER)
