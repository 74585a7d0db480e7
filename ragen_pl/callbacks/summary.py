"""What a run came to: a table of before and after, and the commands that go on from here."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger
from rich.console import Console
from rich.table import Table

from ragen_pl.metrics.intervals import wilson

# Rows of the table: word, metric, digits.
_ROWS = (
    ("success", "success", 3),
    ("return", "return", 3),
    ("turns", "turns", 2),
    ("valid actions", "valid_actions", 3),
    ("response tokens", "response_tokens", 1),
)


class RunSummary(pl.Callback):
    """Remember a run's first and last validation and print them side by side.

    Args:
        references: metrics to set beside them, by player: `{"random": {"success": 0.2}}`.
        print_at_end: print when fit ends; set it to False to call `show` later, with more references.
        console: where to print; default the terminal.
    """

    def __init__(
        self,
        *,
        references: Mapping[str, Mapping[str, float]] | None = None,
        print_at_end: bool = True,
        console: Console | None = None,
    ) -> None:
        self.references = {name: dict(figures) for name, figures in (references or {}).items()}
        self.print_at_end, self.console = print_at_end, console
        self.before: dict[str, float] = {}
        self.after: dict[str, float] = {}

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take note of the validation sets' metrics."""
        if trainer.sanity_checking:
            return
        figures = {
            name.removeprefix("val/"): float(value)
            for name, value in trainer.callback_metrics.items()
            if name.startswith("val/")
        }
        self.before = self.before or figures
        self.after = figures

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the summary."""
        if self.print_at_end:
            self.show(trainer)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return what a resumed run needs to know."""
        return {"before": dict(self.before), "after": dict(self.after)}

    def load_state_dict(self, state_dict: dict[str, dict[str, float]]) -> None:
        """Restore `state_dict`."""
        self.before, self.after = dict(state_dict["before"]), dict(state_dict["after"])

    def show(
        self,
        trainer: pl.Trainer,
        *,
        references: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Print table and commands, on rank 0."""
        if not trainer.is_global_zero:
            return
        console = self.console or Console()
        if not console.is_terminal and self.console is None:
            console.width = 120  # a log has no width of its own, and 80 would wrap the table
        columns = {"before": self.before, "after": self.after}
        if self.after:
            console.print(summary_table({**columns, **self.references, **(references or {})}))
        for word, line in where_things_are(trainer).items():
            console.print(f"{word:<11}{line}", soft_wrap=True, highlight=False, markup=False)


def summary_table(columns: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table of validation set metrics, a column for each player or moment."""
    table = Table(title="Held-out validation set")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for word, name, digits in _ROWS:
        if any(name in figures for figures in columns.values()):
            table.add_row(word, *(_cell(figures, name, digits) for figures in columns.values()))
    return table


def _cell(figures: Mapping[str, float], name: str, digits: int) -> str:
    if name not in figures:
        return "-"
    text = f"{figures[name]:.{digits}f}"
    if name == "success" and figures.get("episodes"):
        text += f" ± {wilson(figures[name], count=figures['episodes']).half_width:.3f}"
    return text


def where_things_are(trainer: pl.Trainer) -> dict[str, str]:
    """Return where the checkpoint is and the commands to open MLflow and to resume."""
    lines: dict[str, str] = {}
    checkpoint = newest_checkpoint(trainer)
    if checkpoint:
        lines["checkpoint"] = checkpoint
    lines |= what_to_look_at(Path(trainer.default_root_dir))
    for logger in trainer.loggers:
        if isinstance(logger, MLFlowLogger):
            lines["MLflow"] = open_command(str(logger._tracking_uri))
    if checkpoint:
        lines["resume"] = resume_command(own_overrides(), checkpoint=checkpoint)
    return lines


def what_to_look_at(run: Path) -> dict[str, str]:
    """Return where a run's newest trajectory page and its plots are, as far as there are any."""
    pages = sorted(run.glob("trajectories/*/page.html"))
    lines = {"page": str(pages[-1].absolute())} if pages else {}
    if any(run.glob("plots/*.png")):
        lines["plots"] = str((run / "plots").absolute())
    return lines


def newest_checkpoint(trainer: pl.Trainer) -> str | None:
    """Return the absolute path of the last checkpoint, None where none was written."""
    for callback in trainer.checkpoint_callbacks:
        # one that keeps the best is not the newest
        if isinstance(callback, ModelCheckpoint) and callback.monitor is None:
            path = callback.last_model_path or callback.best_model_path
            if path:
                return str(Path(path).absolute())
    return None


def open_command(uri: str) -> str:
    """Return how to look at the runs of a tracking store."""
    return (
        uri
        if uri.startswith(("http://", "https://"))
        else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
    )


def own_overrides() -> list[str]:
    """Return the overrides of this run, which in a sweep are not all of the command line's."""
    if HydraConfig.initialized():
        hydra = HydraConfig.get()
        own = [s.path for s in hydra.runtime.config_sources if s.provider == "command-line"]
        folders = [part for path in own for part in ("--config-dir", path)]
        return [*folders, *hydra.overrides.task]
    return sys.argv[1:]


def resume_command(arguments: Sequence[str], *, checkpoint: str) -> str:
    """Return the command that goes on from a checkpoint, with the arguments the run had.

    >>> resume_command(["env=bandit", "ckpt_path=last"], checkpoint="runs/a/last.ckpt")
    'python -m ragen_pl.fit env=bandit ckpt_path=runs/a/last.ckpt'
    """
    kept = [argument for argument in arguments if not argument.lstrip("+").startswith("ckpt_path=")]
    return f"python -m ragen_pl.fit {shlex.join([*kept, f'ckpt_path={checkpoint}'])}"
