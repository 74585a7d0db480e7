"""Progress of a run: a live display on a terminal, one plain line an iteration in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.metrics.proportions import reports_success
from ragen_pl.metrics.shown import ABOVE_ZERO, PROGRESS
from ragen_pl.trajectory import Trajectory

# Failed episodes in an iteration's line: label, prefix of the metrics.
_PLAYED = (("", "rollout"), ("validation ", "val"))
_DEFAULT_PHASE, _FINISHED = "training", "finished"


@runtime_checkable
class NamesPhase(Protocol):
    """Module that names its training phase, such as the warm start."""

    phase: str


class RolloutProgress(RolloutCallback, ProgressBar):
    """Show iteration, phase, success, return, entropy, tokens/s and remaining time.

    A module that trains by steps instead of iterations, such as the warm start, is shown by its steps. Its
    attribute `phase` names them, if it has one.

    Args:
        refresh_per_second: Refresh rate of the live display.
        console: Where to write; default the terminal.
        lines: Number of log lines of a phase that counts steps.
    """

    needs_trust = ()

    # The run's warm start is shown too.
    in_warm_start = True

    def __init__(
        self, *, refresh_per_second: float = 4.0, console: Console | None = None, lines: int = 10
    ) -> None:
        super().__init__()
        self.refresh_per_second, self.lines = refresh_per_second, lines
        self.console = console or Console()
        self._enabled = True
        self._display: _Display | None = None
        self._by_steps = False
        self._start_time = self._rollout_start_time = 0.0
        self._first_count = self._reported_count = 0
        # whether a log has no line yet with the metrics of the last validation
        self._has_validated = False
        self._tokens_per_second: float | None = None

    def disable(self) -> None:
        """Show nothing; Lightning calls this on ranks that do not show progress."""
        self._enabled = False

    def enable(self) -> None:
        """Show progress again."""
        self._enabled = True

    # ---- Lightning's hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Keep the Trainer; only rank 0 shows progress."""
        super().setup(trainer, pl_module, stage)
        if not trainer.is_global_zero:
            self.disable()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the display."""
        self._by_steps = trainer.max_epochs in (None, -1)
        self._start_time, self._first_count = time.monotonic(), self._count()
        self._reported_count = self._first_count
        if self._enabled and self.console.is_terminal:
            self._display = _Display(self.console, refresh_per_second=self.refresh_per_second)
        self._show(_DEFAULT_PHASE)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Advance the update phase."""
        if self._by_steps:
            self._show(_phase_of(pl_module))
            self._report_steps()
        else:
            self._show("update", batch_idx + 1, int(trainer.num_training_batches))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the previous iteration, whose metrics are now complete."""
        self._report()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the validation phase; in a log, that before the first iteration has a line."""
        self._show("validate")
        if self._is_first_validation:
            self._write("validation before the first iteration")

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Advance the validation."""
        batches = trainer.num_val_batches
        total = batches[dataloader_idx] if isinstance(batches, list) else batches
        self._show("validate", batch_idx + 1, int(total) if total != float("inf") else None)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the last iteration and close the display."""
        self._report()
        self._show(_FINISHED)
        self._close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Close the display."""
        self._close()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the metrics of the validation, in the next line of a log alone."""
        self._has_validated = True
        if self._is_first_validation:
            self._line("before the first iteration")
            self._has_validated = False

    # ---- hooks of the rollout/update loop

    def on_rollout_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the rollout phase."""
        self._report()
        self._rollout_start_time = time.monotonic()
        self._show("rollout")

    def on_rollout_progress(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, done: int, total: int
    ) -> None:
        """Advance the rollout phase."""
        self._show("rollout", done, total)

    def on_rollout_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, trajectories: Sequence[Trajectory]
    ) -> None:
        """Measure the rollout's speed on this rank."""
        tokens = sum(
            len(turn.response_ids) for trajectory in trajectories for turn in trajectory.turns
        )
        self._tokens_per_second = tokens / max(1e-9, time.monotonic() - self._rollout_start_time)
        self._show("update")

    # ---- content

    @property
    def _is_first_validation(self) -> bool:
        """Whether the validation under way comes before the first iteration."""
        fits = self.trainer.state.fn == TrainerFn.FITTING
        return fits and not self._by_steps and not self._rollout_start_time and not self._count()

    def _count(self) -> int:
        return self.trainer.global_step if self._by_steps else self.trainer.current_epoch

    def _total(self) -> int | None:
        total = self.trainer.max_steps if self._by_steps else self.trainer.max_epochs
        return total if total is not None and total > 0 else None

    def _show(self, phase: str, done: int = 0, total: int | None = None) -> None:
        if self._display is not None:
            self._display.update(
                overall=(phase if self._by_steps else "iteration", self._count(), self._total()),
                phase=(phase, done, total),
                text=self._text(),
            )

    def _text(self) -> str:
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        if self._by_steps:
            fields = [f"{name} {value:.3g}" for name, value in metrics.items() if name != "epoch"][
                :4
            ]
        else:
            if self._display is None and not self._has_validated:
                # episodes that failed stay in the lines, as a warning
                metrics.pop("val/success", None)
            fields = iteration_metrics(metrics)
            speed = metrics.get("time/tokens_per_second", self._tokens_per_second)
            if speed is not None:
                fields.append(f"{speed:,.0f} tokens/s")
        count, total = self._count(), self._total()
        if total is not None and count > self._first_count:
            pace = (time.monotonic() - self._start_time) / (count - self._first_count)
            fields.append(f"{duration(pace * (total - count))} left")
        return "  ".join(fields)

    def _report(self) -> None:
        """Print the line of a finished iteration if there is no live display."""
        count = self._count()
        if self._by_steps or count == self._reported_count:
            return
        self._reported_count = count
        self._line(f"iteration {count}/{self._total() or '?'}")
        self._has_validated = False

    def _report_steps(self) -> None:
        count, total = self._count(), self._total()
        interval = max(1, (total or 10 * self.lines) // self.lines)
        if count != self._reported_count and count % interval == 0:
            self._reported_count = count
            self._line(f"{_phase_of(self.trainer.lightning_module)} {count}/{total or '?'}")

    def _line(self, head: str) -> None:
        self._write(f"{head}  {self._text()}")

    def _write(self, line: str) -> None:
        """Write a line if there is no live display."""
        if self._enabled and self._display is None:
            print(line, file=self.console.file, flush=True)

    def _close(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None


def _phase_of(pl_module: pl.LightningModule) -> str:
    return pl_module.phase if isinstance(pl_module, NamesPhase) else _DEFAULT_PHASE


def iteration_metrics(metrics: Mapping[str, float]) -> list[str]:
    """Return an iteration's metrics as text; missing ones and counts of nothing are left out.

    >>> iteration_metrics({"rollout/success": 0.5, "val/success": 0.25, "update/skipped_steps": 0.0})
    ['success 0.500', 'validation success 0.250']
    >>> iteration_metrics({"rollout/failed_episodes": 2.0, "rollout/episodes": 6.0, "update/skipped_steps": 1.0})
    ['skipped steps 1', 'failed 2 of 8']
    >>> iteration_metrics({"rollout/valid_actions": 1.0, "rollout/truncated": 0.25})
    ['valid actions 1.000', 'truncated 0.250']

    Where the environment reports no success, the returns are shown:

    >>> iteration_metrics({"val/success": 0.0, "val/success_reported": 0.0, "val/return": 2.5})
    ['validation return 2.500']
    """
    silent = {
        f"{prefix}/success"
        for _, prefix in _PLAYED
        if f"{prefix}/success" in metrics and not reports_success(metrics, f"{prefix}/")
    }
    shown = [
        f"{label} {float(metrics[name]):.{digits}f}"
        for label, name, digits in PROGRESS
        if name in metrics
        and name not in silent
        and (name not in ABOVE_ZERO or float(metrics[name]) > 0)
    ]
    if "val/success" in silent:
        shown.append(f"validation return {float(metrics['val/return']):.3f}")
    for label, prefix in _PLAYED:
        failed = metrics.get(f"{prefix}/failed_episodes", 0.0)
        if failed:
            total = failed + metrics[f"{prefix}/episodes"]
            shown.append(f"{label}failed {failed:.0f} of {total:.0f}")
    return shown


def duration(seconds: float) -> str:
    """Return a time in minutes and seconds, with hours if there are any.

    >>> duration(75), duration(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Display:
    """Two bars and a line of metrics on a terminal."""

    def __init__(self, console: Console, *, refresh_per_second: float) -> None:
        self.bars = Progress(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            console=console,
            auto_refresh=False,
        )
        self.rows: list[TaskID] = [self.bars.add_task("", total=None) for _ in range(2)]
        self.text = Text()
        self.live = Live(
            Group(self.bars, self.text), console=console, refresh_per_second=refresh_per_second
        )
        self.live.start()

    def update(
        self,
        *,
        overall: tuple[str, int, int | None],
        phase: tuple[str, int, int | None],
        text: str,
    ) -> None:
        """Show both bars, each as label, completed and total, and the text."""
        for row, (label, completed, total) in zip(self.rows, (overall, phase), strict=True):
            self.bars.update(row, description=label, completed=completed, total=total)
        self.bars.update(self.rows[1], visible=phase[0] not in (overall[0], _FINISHED))
        self.text.plain = text

    def close(self) -> None:
        self.live.stop()
