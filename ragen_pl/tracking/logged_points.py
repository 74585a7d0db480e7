"""The points that a run has logged before it was resumed, which are not logged again."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from ragen_pl.base.files import disk_errors_of
from ragen_pl.base.foreign_files import plain_json

ValueT = TypeVar("ValueT")


class LoggedPoints:
    """Steps of metrics. Most steps have the same names, so that memory grows with the steps alone."""

    def __init__(self) -> None:
        self._sets: dict[frozenset[str], frozenset[str]] = {}
        self._at: dict[int | None, set[frozenset[str]]] = defaultdict(set)

    def add(self, names: Iterable[str], step: int | None) -> None:
        """Note that metrics have a point at a step."""
        some = frozenset(names)
        self._at[step].add(self._sets.setdefault(some, some))

    def new(self, metrics: Mapping[str, ValueT], step: int | None) -> dict[str, ValueT]:
        """Return the metrics without a point at a step."""
        logged = self._at.get(step, ())
        return {
            name: value
            for name, value in metrics.items()
            if not any(name in names for names in logged)
        }


class MetricsFile:
    """The run's own copy of its metrics: a line of JSON for each step.

    Args:
        file: Where it is. It is continued if it is there.
    """

    def __init__(self, file: Path) -> None:
        self._earlier = LoggedPoints()
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            for line in file.read_bytes().splitlines():
                # a killed process may have written half of the last one
                with suppress(ValueError, KeyError, TypeError):
                    point = plain_json(line)
                    self._earlier.add(point["metrics"], point["step"])
        self._file = file

    def new(self, metrics: Mapping[str, ValueT], step: int | None) -> dict[str, ValueT]:
        """Return the metrics that an earlier process has not logged at a step."""
        return self._earlier.new(metrics, step)

    def add(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Append metrics; NaN and infinite values are written as text."""
        plain = {
            name: float(value) if math.isfinite(value) else str(float(value))
            for name, value in metrics.items()
        }
        with disk_errors_of(self._file), self._file.open("a") as stream:
            stream.write(json.dumps({"step": step, "metrics": plain}) + "\n")
