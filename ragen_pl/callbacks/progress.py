"""Progress of a run: a live display on a terminal, one plain line per iteration in a log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from ragen_pl.callbacks.figures import duration, iteration_metrics
from ragen_pl.loops.hooks import RolloutCallback


class RolloutProgress(RolloutCallback, ProgressBar):
    """Show iteration, phase, success, reward, entropy, tokens/s and time left.

    A module that trains by steps rather than by iterations (such as the warm start) is shown by its steps;
    its name is the module's attribute `phase`, else "training".

    Args:
        refresh_per_second: of the live display.
        console: where to write; default the terminal.
        lines: of a log for a phase that counts steps.
    """

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
        self._began = self._rollout_began = 0.0
        self._first = self._reported = 0
        self._tokens_per_second: float | None = None

    def disable(self) -> None:
        """Show nothing (Lightning calls it on the ranks that do not show progress)."""
        self._enabled = False

    def enable(self) -> None:
        """Show progress again."""
        self._enabled = True

    # ---- Lightning's hooks

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Keep the Trainer."""
        super().setup(trainer, pl_module, stage)
        if not trainer.is_global_zero:
            self.disable()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the display."""
        self._by_steps = trainer.max_epochs in (None, -1)
        self._began, self._first = time.monotonic(), self._done()
        self._reported = self._first
        if self._enabled and self.console.is_terminal:
            self._display = _Display(self.console, refresh_per_second=self.refresh_per_second)
        self._phase("training")

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
            self._phase(str(getattr(pl_module, "phase", "training")))
            self._report_steps()
        else:
            self._phase("update", batch_idx + 1, int(trainer.num_training_batches))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the iteration before, all of whose metrics are now known."""
        self._report()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show that validation sets are being played."""
        self._phase("validate")

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
        self._phase("validate", batch_idx + 1, int(total) if total != float("inf") else None)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the last iteration and close the display."""
        self._report()
        self._phase("finished")
        self._close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Give the terminal back."""
        self._close()

    # ---- hooks of the rollout/update loop

    def on_rollout_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the rollout phase."""
        self._report()
        self._rollout_began = time.monotonic()
        self._phase("rollout")

    def on_rollout_progress(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, done: int, total: int
    ) -> None:
        """Advance the rollout phase."""
        self._phase("rollout", done, total)

    def on_rollout_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, trajectories: Sequence[Any]
    ) -> None:
        """Measure the rollout's speed, on this rank."""
        tokens = sum(len(turn.response_ids) for one in trajectories for turn in one.turns)
        self._tokens_per_second = tokens / max(1e-9, time.monotonic() - self._rollout_began)
        self._phase("update")

    # ---- what is shown

    def _done(self) -> int:
        return self.trainer.global_step if self._by_steps else self.trainer.current_epoch

    def _total(self) -> int | None:
        total = self.trainer.max_steps if self._by_steps else self.trainer.max_epochs
        return total if total is not None and total > 0 else None

    def _phase(self, name: str, done: int = 0, total: int | None = None) -> None:
        if self._display is not None:
            word = name if self._by_steps else "iteration"
            self._display.show(
                word, self._done(), self._total(), phase=(name, done, total), words=self._words()
            )

    def _words(self) -> str:
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        words = iteration_metrics(metrics)
        speed = metrics.get("time/tokens_per_second", self._tokens_per_second)
        if self._by_steps:
            words = [f"{n} {v:.3g}" for n, v in metrics.items() if n != "epoch"][:4]
        elif speed is not None:
            words.append(f"{speed:,.0f} tokens/s")
        done, total = self._done(), self._total()
        if total is not None and done > self._first:
            pace = (time.monotonic() - self._began) / (done - self._first)
            words.append(f"{duration(pace * (total - done))} left")
        return "  ".join(words)

    def _report(self) -> None:
        """Print the line of a finished iteration, where there is no live display."""
        done = self._done()
        if self._by_steps or done == self._reported:
            return
        self._reported = done
        self._line(f"iteration {done}/{self._total() or '?'}")

    def _report_steps(self) -> None:
        done, total = self._done(), self._total()
        if done != self._reported and done % max(1, (total or 10 * self.lines) // self.lines) == 0:
            self._reported = done
            phase = getattr(self.trainer.lightning_module, "phase", "training")
            self._line(f"{phase} {done}/{total or '?'}")

    def _line(self, head: str) -> None:
        if self._enabled and self._display is None:
            print(f"{head}  {self._words()}", file=self.console.file, flush=True)

    def _close(self) -> None:
        if self._display is not None:
            self._display.close()
            self._display = None


class _Display:
    """Two bars and a line of metrics on a terminal."""

    def __init__(self, console: Console, *, refresh_per_second: float) -> None:
        columns = (
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
        )
        self.bars = Progress(*columns, console=console, auto_refresh=False)
        self.rows: list[TaskID] = [self.bars.add_task("", total=None) for _ in range(2)]
        self.text = Text()
        self.live = Live(
            Group(self.bars, self.text), console=console, refresh_per_second=refresh_per_second
        )
        self.live.start()

    def show(
        self,
        word: str,
        done: int,
        total: int | None,
        *,
        phase: tuple[str, int, int | None],
        words: str,
    ) -> None:
        name, phase_done, phase_total = phase
        self.bars.update(self.rows[0], description=word, completed=done, total=total)
        self.bars.update(
            self.rows[1],
            description=name,
            completed=phase_done,
            total=phase_total,
            visible=name != word,
        )
        self.text.plain = words

    def close(self) -> None:
        self.live.stop()
