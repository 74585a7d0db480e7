"""RunSummary: a table of the validation before and after a run, and the commands to continue from there."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from rich.table import Table

from ragen_pl.base.constraints import path_override
from ragen_pl.base.phases import wide_console
from ragen_pl.callbacks.access import mlflow_loggers, record_logger, run_folder
from ragen_pl.metrics.proportions import reports_success, success_interval
from ragen_pl.metrics.record import RecordReader
from ragen_pl.metrics.shown import VALIDATED, environments_in

_FAILED = "failed_episodes"
# Columns of a log, which has no width of its own; rich's default of 80 would wrap the table.
_LOG_WIDTH = 120
# of `mlflow ui`
_LOCAL_SERVER = "http://127.0.0.1:5000"


class RunSummary(pl.Callback):
    """Print the first and the last validation of a run's record side by side.

    Args:
        references: Metrics of other policies for further rows: `{"random": {"success": 0.2}}`.
        print_at_end: Print when fit ends; set it to False to call `show` later with more references.
        console: Where to print; default the terminal.
    """

    def __init__(
        self,
        *,
        references: Mapping[str, Mapping[str, float]] | None = None,
        print_at_end: bool = True,
        console: Console | None = None,
    ) -> None:
        self.references = {name: dict(metrics) for name, metrics in (references or {}).items()}
        self.print_at_end, self.console = print_at_end, console

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the summary."""
        if self.print_at_end:
            self.show(trainer)

    def show(
        self,
        trainer: pl.Trainer,
        *,
        references: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Print the table and the commands, on rank 0."""
        if not trainer.is_global_zero:
            return
        console = self.console or wide_console(_LOG_WIDTH)
        if validations := _validations(trainer):
            moments = {"before": validations[0], "after": validations[-1]}
            rows = dict(moments)
            if names := environments_in(validations[-1]):
                rows = {f"{moment}, worst": metrics for moment, metrics in moments.items()}
            for name in names:
                for moment, metrics in moments.items():
                    rows[f"{moment}, {name}"] = {
                        key.removeprefix(f"{name}/"): value
                        for key, value in metrics.items()
                        if key.startswith(f"{name}/")
                    }
            console.print(summary_table({**rows, **self.references, **(references or {})}))
        for label, text in next_steps(trainer).items():
            console.print(f"{label:<11}{text}", soft_wrap=True, highlight=False, markup=False)


def _validations(trainer: pl.Trainer) -> list[dict[str, float]]:
    """Return the metrics of the validation set from the run's record, in order."""
    logger = record_logger(trainer)
    if logger is None:
        return []
    points = RecordReader(logger.record.folder, only=lambda name: name.startswith("val/")).points()
    return [
        {name.removeprefix("val/"): value for name, value in point.metrics.items()}
        for point in points
        if point.metrics
    ]


def summary_table(rows: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table of validation metrics with a row for each policy or moment, of which there may be many."""
    known = [column for column in VALIDATED if any(column[1] in row for row in rows.values())]
    fails = any(metrics.get(_FAILED) for metrics in rows.values())
    table = Table(title="Validation set")
    table.add_column("", no_wrap=True)
    for label in [*(label for label, _, _ in known), *(["failed episodes"] if fails else [])]:
        # a header of two words may have two lines, a number may not
        table.add_column(label, justify="right", no_wrap=" " not in label)
    for name, metrics in rows.items():
        cells = [_cell(metrics, metric, digits) for _, metric, digits in known]
        table.add_row(name, *cells, *([_failed(metrics)] if fails else []))
    return table


def _failed(metrics: Mapping[str, float]) -> str:
    """Return the number of failed episodes, which enter no other column."""
    if _FAILED not in metrics:
        return "-"
    return f"{metrics[_FAILED]:.0f} of {metrics[_FAILED] + metrics['episodes']:.0f}"


def _cell(metrics: Mapping[str, float], name: str, digits: int) -> str:
    if name not in metrics or (name == "success" and not reports_success(metrics)):
        return "-"
    text = f"{metrics[name]:.{digits}f}"
    if name == "success" and metrics.get("episodes"):
        text += f" ± {success_interval(metrics).half_width:.3f}"
    return text


def next_steps(trainer: pl.Trainer) -> dict[str, str]:
    """Return the paths of checkpoint, page and plots, and the commands to open MLflow and to resume."""
    lines: dict[str, str] = {}
    checkpoint = newest_checkpoint(trainer)
    if checkpoint:
        lines["checkpoint"] = checkpoint
    lines |= page_and_plots(run_folder(trainer))
    for logger in mlflow_loggers(trainer):
        uri = str(logger._tracking_uri)
        lines["MLflow"] = open_command(uri)
        if logger.experiment_id is not None:
            lines["its page"] = runs_page(uri, experiment=logger.experiment_id)
    if checkpoint:
        lines["resume"] = resume_hint(run_overrides(), checkpoint=checkpoint)
    return lines


def page_and_plots(run: Path) -> dict[str, str]:
    """Return the paths of a run's newest trajectory page and of its plots, if they exist."""
    # later iterations may have more digits
    pages = sorted(
        run.glob("trajectories/*/page.html"),
        key=lambda page: (len(page.parent.name), page.parent.name),
    )
    lines = {"page": str(pages[-1].absolute())} if pages else {}
    if any(run.glob("plots/*.png")):
        lines["plots"] = str((run / "plots").absolute())
    return lines


def newest_checkpoint(trainer: pl.Trainer) -> str | None:
    """Return the absolute path of the last checkpoint, or None if none was written."""
    for callback in trainer.checkpoint_callbacks:
        # A checkpoint with a monitor is the best one, not the newest.
        if isinstance(callback, ModelCheckpoint) and callback.monitor is None:
            path = callback.last_model_path or callback.best_model_path
            if path:
                return str(Path(path).absolute())
    return None


def open_command(uri: str) -> str:
    """Return the command that shows a tracking store, or the address of a server."""
    if uri.startswith(("http://", "https://")):
        return uri
    return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"


def runs_page(uri: str, *, experiment: str) -> str:
    """Return the address of an experiment's runs. MLflow begins with another page, for traces.

    Args:
        uri: Tracking server, or a store that `open_command` serves.
        experiment: Id of the experiment.

    >>> runs_page("http://host:5000/", experiment="1")
    'http://host:5000/#/experiments/1/runs?workflowType=machine_learning'
    """
    server = uri.rstrip("/") if uri.startswith(("http://", "https://")) else _LOCAL_SERVER
    return f"{server}/#/experiments/{experiment}/runs?workflowType=machine_learning"


def run_overrides() -> list[str]:
    """Return the overrides of this run; in a sweep, the command line has those of other runs too."""
    if HydraConfig.initialized():
        hydra = HydraConfig.get()
        sources = hydra.runtime.config_sources
        folders = [source.path for source in sources if source.provider == "command-line"]
        options = [option for path in folders for option in ("--config-dir", path)]
        return [*options, *hydra.overrides.task]
    return sys.argv[1:]


def resume_hint(arguments: Sequence[str], *, checkpoint: str) -> str:
    """Return how to resume: the command, or in a notebook and other Python programs the setting."""
    if HydraConfig.initialized():
        return resume_command(arguments, checkpoint=checkpoint)
    return f"ragen_pl.train(…, ckpt_path={checkpoint!r})"


def resume_command(arguments: Sequence[str], *, checkpoint: str) -> str:
    """Return the command that resumes from a checkpoint with the run's arguments.

    >>> resume_command(["env=bandit", "ckpt_path=last"], checkpoint="runs/a/last.ckpt")
    'python -m ragen_pl.fit env=bandit ckpt_path=runs/a/last.ckpt'
    """
    kept = [argument for argument in arguments if not argument.lstrip("+").startswith("ckpt_path=")]
    return f"python -m ragen_pl.fit {shlex.join([*kept, path_override('ckpt_path', checkpoint)])}"
