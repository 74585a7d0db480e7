"""Progress of phases outside training: a bar on a terminal, lines in a log."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from ragen_pl.base.phases import PhaseProgress, log, phase


class Lines(logging.Handler):
    """Handler that keeps messages and tells when there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.arrived = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.arrived.set()


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, level = Lines(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


def plain(total: int, *, short_s: float) -> PhaseProgress:
    console = Console(file=io.StringIO())
    return PhaseProgress("baseline random", total, console=console, short_s=short_s, interval_s=0.0)


def test_a_log_has_a_line_at_the_start_at_tenths_and_at_the_end(lines: Lines) -> None:
    progress = plain(40, short_s=0.0)
    progress.start()
    # before any episode has ended
    assert lines.arrived.wait(60)
    for done in range(1, 41):
        progress(done, 40)
    progress.end()
    assert lines.lines[0] == "baseline random: 0 of 40"
    assert lines.lines[1:10] == [f"baseline random: {done} of 40" for done in range(4, 40, 4)]
    assert lines.lines[10].startswith("baseline random: 40 of 40, ") and len(lines.lines) == 11


def test_a_short_phase_has_no_line(lines: Lines) -> None:
    progress = plain(40, short_s=600.0)
    progress.start()
    for done in range(41):
        progress(done, 40)
    progress.end()
    assert lines.lines == []


def test_an_error_ends_the_phase(lines: Lines) -> None:
    with pytest.raises(RuntimeError), phase("demonstrations", 4) as progress:
        raise RuntimeError("broken")
    assert not progress._timer.is_alive() or progress._timer.finished.is_set()


def test_a_terminal_has_a_bar_that_vanishes(lines: Lines) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    progress = PhaseProgress("demonstrations", 40, console=console)
    progress.start()
    progress(10, 40)
    progress.end()
    assert "demonstrations" in out.getvalue() and "/40" in out.getvalue()
    assert lines.lines == []


def test_a_quiet_program_stays_quiet(lines: Lines) -> None:
    log.setLevel(logging.WARNING)
    progress = plain(1, short_s=0.0)
    progress.start()
    progress(1, 1)
    progress.end()
    assert lines.lines == [] and not progress._timer.is_alive()
