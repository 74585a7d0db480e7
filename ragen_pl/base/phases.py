"""Progress of phases outside training, such as demonstrations and baselines: a bar on a terminal, lines in a log.

Lines and bars are shown where the level of this module's logger is INFO or lower, as in the commands. torch is not
imported here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

log = logging.getLogger(__name__)

# lines of a phase in a log, and the seconds between two of them at least
_LINES, _INTERVAL_S = 10, 2.0
# a shorter phase has no line
_SHORT_S = 1.0


def wide_console(log_width: int) -> Console:
    """Return a console for tables.

    Args:
        log_width: Columns where the output is no terminal; rich's default of 80 would wrap tables.
    """
    console = Console()
    if not console.is_terminal:
        console.width = log_width
    return console


class PhaseProgress:
    """Progress of one phase. Call it with the number of episodes done and of all.

    Args:
        label: Name of the phase.
        total: Number of episodes.
        console: Where to draw; default the terminal.
        short_s: Phases that are shorter have no line in a log.
        interval_s: Seconds between two lines at least.
    """

    def __init__(
        self,
        label: str,
        total: int,
        *,
        console: Console | None = None,
        short_s: float = _SHORT_S,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self.label, self.total, self.interval_s = label, total, interval_s
        self._console = console or Console()
        self._start = self._last = time.monotonic()
        self._done = self._reported = 0
        self._announced = False
        # also called by the timer's thread
        self._lock = threading.Lock()
        self._timer = threading.Timer(short_s, self._announce)
        self._timer.daemon = True
        self._bar: Progress | None = None

    def start(self) -> None:
        """Show the phase."""
        if not log.isEnabledFor(logging.INFO):
            return
        if not self._console.is_terminal:
            self._timer.start()
            return
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._bar.add_task(self.label, total=self.total)
        self._bar.start()

    def __call__(self, done: int, total: int) -> None:
        """Show how many of the episodes are done."""
        self._done, self.total = done, total
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total)
            return
        # the end has a line of its own
        is_tenth = (done - self._reported) * _LINES >= total and done < total
        if is_tenth and self._announced and time.monotonic() - self._last >= self.interval_s:
            self._line()

    def end(self) -> None:
        """Hide the phase; in a log, say how long it took."""
        self._timer.cancel()
        if self._bar is not None:
            self._bar.stop()
        with self._lock:
            announced, self._announced = self._announced, False
        if announced:
            seconds = time.monotonic() - self._start
            log.info("%s: %d of %d, %.0f s", self.label, self._done, self.total, seconds)

    def _announce(self) -> None:
        with self._lock:
            self._announced = True
        self._line()

    def _line(self) -> None:
        self._last, self._reported = time.monotonic(), self._done
        log.info("%s: %d of %d", self.label, self._done, self.total)


@contextmanager
def phase(label: str, total: int, *, shown: bool = True) -> Iterator[PhaseProgress]:
    """Show a phase while it lasts.

    Args:
        label: Name of the phase.
        total: Number of episodes.
        shown: Whether this process shows it, such as the first rank.
    """
    progress = PhaseProgress(label, total)
    if shown:
        progress.start()
    try:
        yield progress
    finally:
        progress.end()
