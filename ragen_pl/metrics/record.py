"""A run's record of its metrics, `metrics.jsonl`, from which plots, live view, summary and trackers take them.

    {"step": 3, "phase": "training", "time": 1790000000.5, "metrics": {"rollout/success": 0.5, "rollout/return": "nan"}}
    {"keep": 12}

A line with metrics is a point: those of an iteration, of a validation, or of a step of the warm start. Lines are only
appended. A run that goes on from a checkpoint appends `keep`, the number of points before the checkpoint: those after
it are dropped, and come again. A tracker such as MLflow cannot take points back: it gets none that has
`"tracked": false`, as those that come again have.
"""

from __future__ import annotations

import csv
import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ragen_pl.base.files import atomic_write
from ragen_pl.base.foreign_files import object_in, plain_json
from ragen_pl.base.lines import LinesFile, whole_lines

FILE = "metrics.jsonl"
"""The record in a run's folder."""
WARM_START, TRAINING, VALIDATION = "warm start", "training", "validation"
"""Phases of points."""
ELAPSED = "elapsed_s"
"""Metric with the seconds of reinforcement learning."""
Row = dict[str, float]
"""Metrics of an iteration: `iteration`, `elapsed_s`, `rollout/success`, `val/success`, `time/rollout_s` ..."""

_ROWS = "plots/rows.jsonl"
_NON_FINITE = ("nan", "inf", "-inf")
# larger numbers are damage
_LARGEST = 1e300
# bytes of a line
_LONGEST_LINE = 1 << 24
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class Point:
    """Metrics that were logged together.

    Attributes:
        step: The iteration, or the step of the warm start.
        metrics: Values by name.
        phase: One of the phases above.
        time: Seconds since 1970; None of an earlier version.
        tracked: Whether trackers get it.
    """

    step: int
    metrics: dict[str, float]
    phase: str = TRAINING
    time: float | None = None
    tracked: bool = True

    def line(self) -> dict[str, Any]:
        """Return its line of the record."""
        plain = {
            name: float(value) if math.isfinite(value) else str(float(value))
            for name, value in self.metrics.items()
        }
        line = {"step": self.step, "phase": self.phase, "time": self.time, "metrics": plain}
        return line if self.tracked else line | {"tracked": False}


def point_of(line: Mapping[str, Any] | None) -> Point | None:
    """Return the point of a line, such as a row of an earlier version; None if it is none."""
    if line is None:
        return None
    metrics, step = line.get("metrics"), line.get("step")
    if metrics is None:
        metrics, step = line, line.get("iteration")
    step = _number(step)
    if not isinstance(metrics, dict) or step is None or not math.isfinite(step):
        return None
    named = {str(name): _number(value) for name, value in metrics.items()}
    numbers = {name: value for name, value in named.items() if value is not None}
    learns = any(name.startswith("warm_start/") for name in numbers)
    phase = line.get("phase", WARM_START if learns else TRAINING)
    time_s = _number(line.get("time"))
    if time_s is not None and not math.isfinite(time_s):
        time_s = None
    return Point(int(step), numbers, str(phase), time_s, line.get("tracked") is not False)


def _number(value: object) -> float | None:
    if isinstance(value, str):
        return float(value) if value in _NON_FINITE else None
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None


class RecordReader:
    """Reads the points that count, without those that resumes have dropped. Later calls read the new lines.

    The file may be somebody else's: what is no point is left out.

    Args:
        folder: The run's folder.
        only: Tells which metrics are taken; default all.

    Attributes:
        drops: How often points were dropped that had been read.
    """

    def __init__(self, folder: Path, *, only: Callable[[str], bool] = lambda name: True) -> None:
        self._folder, self._only = folder, only
        self._read_from: tuple[Path, int] | None = None
        self._end, self._points = 0, list[Point]()
        self.drops = 0
        self._lock = threading.Lock()

    @property
    def file(self) -> Path:
        """The run's file: the record, or the rows of an earlier version."""
        rows = self._folder / _ROWS
        return rows if rows.is_file() else self._folder / FILE

    def points(self) -> list[Point]:
        """Return the points in order."""
        with self._lock:
            self._read_on()
            return list(self._points)

    def _read_on(self) -> None:
        file = self.file
        found = file.stat() if file.is_file() else None
        state = (file, found.st_ino) if found else None
        # rows of an earlier version change
        if state != self._read_from or file.name != FILE or (found and found.st_size < self._end):
            self.drops += file.name == FILE and bool(self._points)
            self._read_from, self._end, self._points = state, 0, []
        for _, end, entry in entries(file, start=self._end):
            self._end = end
            if isinstance(entry, int):
                self.drops += entry < len(self._points)
                del self._points[entry:]
            else:
                taken = {name: entry.metrics[name] for name in entry.metrics if self._only(name)}
                self._points.append(replace(entry, metrics=taken))

    def rows(self) -> list[Row]:
        """Return the finite metrics by iteration; of one that is logged twice the last value."""
        rows: dict[int, Row] = {}
        for point in self.points():
            if point.phase != WARM_START:
                row = rows.setdefault(point.step, {"iteration": float(point.step)})
                row |= {
                    name: value for name, value in point.metrics.items() if math.isfinite(value)
                }
        return [rows[step] for step in sorted(rows) if ELAPSED in rows[step]]


def entries(file: Path, *, start: int = 0) -> Iterator[tuple[int, int, Point | int]]:
    """Yield the points of a record and the numbers of points to keep, with the bytes that each begins and ends at."""
    for at, line in whole_lines(file, start=start):
        value = object_in(line)
        keep = None if value is None else value.get("keep")
        entry = keep if isinstance(keep, int) and keep >= 0 else point_of(value)
        if entry is not None:
            yield at, at + len(line), entry


def point_at(file: Path, at: int) -> Point | None:
    """Return the point whose line begins at a byte of a record; None where none does."""
    if at >= file.stat().st_size:
        return None
    with file.open("rb") as stream:
        stream.seek(max(0, at - 1))
        if at and stream.read(1) != b"\n":
            return None
        line = stream.readline(_LONGEST_LINE)
    return point_of(object_in(line)) if line.endswith(b"\n") else None


class LoggedPoints:
    """Steps of metrics. Most steps have the same names, so that memory grows with the steps alone."""

    def __init__(self) -> None:
        self._sets: dict[frozenset[str], frozenset[str]] = {}
        self._at: dict[int, set[frozenset[str]]] = defaultdict(set)

    def shared(self, names: Iterable[str]) -> frozenset[str]:
        """Return names as a set that all points with the same ones have."""
        some = frozenset(names)
        return self._sets.setdefault(some, some)

    def add(self, names: Iterable[str], step: int) -> frozenset[str]:
        """Note that metrics have a point at a step; return their names."""
        some = self.shared(names)
        self._at[step].add(some)
        return some

    def without_logged(self, metrics: Mapping[str, ValueT], step: int) -> dict[str, ValueT]:
        """Return the metrics without a point at a step."""
        logged = self._at.get(step, ())
        return {
            name: value
            for name, value in metrics.items()
            if not any(name in names for names in logged)
        }


class MetricsRecord:
    """The record of a run, as the one process that writes it has it.

    A metric that was logged at a step before the last resume is not logged again, unless its point was dropped.

    Args:
        folder: The run's folder, whose record is continued. Files of an earlier version become a record.
    """

    def __init__(self, folder: Path) -> None:
        convert(folder)
        self.folder, self.file, self.phase = folder, folder / FILE, TRAINING
        self._lines = LinesFile(self.file)
        # points until the last resume: all that were logged, and those that count
        self._ever, self._kept = LoggedPoints(), LoggedPoints()
        self._points: list[tuple[str, int, frozenset[str]]] = []
        for _, _, entry in entries(self.file):
            if isinstance(entry, int):
                del self._points[entry:]
            else:
                names = self._ever.add(entry.metrics, entry.step)
                self._points.append((entry.phase, entry.step, names))
        self._note_kept()

    def _note_kept(self) -> None:
        self._kept = LoggedPoints()
        for _, step, names in self._points:
            self._kept.add(names, step)

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self._lines.size

    @property
    def count(self) -> int:
        """Number of points."""
        return len(self._points)

    def add(self, metrics: Mapping[str, float], step: int, *, tracked: bool = True) -> list[Point]:
        """Append those of the metrics that have no point at a step yet; return the points that were made of them."""
        new = self._kept.without_logged(metrics, step)
        first = self._ever.without_logged(new, step) if tracked else {}
        again = {name: value for name, value in new.items() if name not in first}
        points = [
            Point(step, dict(part), self.phase, time.time(), part is first)
            for part in (first, again)
            if part
        ]
        for point in points:
            self._lines.append(point.line())
            self._points.append((point.phase, step, self._ever.shared(point.metrics)))
        return points

    def keep(self, count: int) -> None:
        """Drop all points but the first ones."""
        if count < self.count:
            self._lines.append({"keep": count})
            # this process may have logged some
            for _, step, names in self._points:
                self._ever.add(names, step)
            del self._points[count:]
            self._note_kept()

    def count_until(self, limit: int | None, *, phase: str) -> int:
        """Return the number of points before the first one of a phase after a step.

        Args:
            limit: The step; None for any.
            phase: The warm start, or training with its validations.
        """
        later = (
            number
            for number, (other, step, _) in enumerate(self._points)
            if (other == WARM_START) == (phase == WARM_START) and (limit is None or step > limit)
        )
        return next(later, self.count)

    def synchronize(self) -> None:
        """Wait until the disk has all points."""
        self._lines.synchronize()


def convert(folder: Path) -> None:
    """Write the record of a run of an earlier version, which had its metrics in several files. Once."""
    _, first = next(whole_lines(folder / FILE), (0, b""))
    if b'"time"' in first:
        return
    found: dict[tuple[bool, int], dict[str, float]] = {}
    for point in map(point_of, _earlier_lines(folder)):
        if point is not None:
            found.setdefault((point.phase != WARM_START, point.step), {}).update(point.metrics)
    phases = {False: WARM_START, True: TRAINING}
    points = [Point(step, found[trains, step], phases[trains]) for trains, step in sorted(found)]
    if points:
        _write_untracked(folder / FILE, points)
        (folder / _ROWS).unlink(missing_ok=True)


def _earlier_lines(folder: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the points in the files of an earlier version as lines, the same one from several; None for no object."""
    for _, line in whole_lines(folder / "mlflow" / "calls.jsonl"):
        # of somebody else's calls some may be none
        with suppress(ValueError, TypeError, AttributeError):
            for name, value, _, step in plain_json(line).get("points", ()):
                yield {"step": step, "metrics": {name: value}}
    table = folder / "csv" / "metrics.csv"
    if table.is_file():
        with table.open(newline="") as stream, suppress(ValueError, TypeError, csv.Error):
            for row in csv.DictReader(stream):
                numbers = {name: float(value) for name, value in row.items() if value}
                yield {"step": numbers.pop("step", None), "metrics": numbers}
    for name in (FILE, _ROWS):
        for _, line in whole_lines(folder / name):
            yield object_in(line)


def inherit(folder: Path, source: Path) -> None:
    """Begin a run's record, if it has none, with that of the run whose checkpoint it goes on from."""
    if folder.resolve() != source.resolve() and not (folder / FILE).exists():
        _write_untracked(folder / FILE, RecordReader(source).points())


def _write_untracked(file: Path, points: Iterable[Point]) -> None:
    with atomic_write(file, durable=True) as partial:
        partial.write_text(
            "".join(json.dumps(replace(point, tracked=False).line()) + "\n" for point in points)
        )
