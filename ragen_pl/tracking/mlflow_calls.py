"""Calls of a run's MLflow client as JSON, for an outbox. MLflow is not loaded."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

from pydantic import Field, TypeAdapter, ValidationError

from ragen_pl.tracking.outbox import Outbox, calls_in

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import MlflowClient

FOLDER = "mlflow"
"""Folder of the calls in a run's folder."""

COPIES = "files"
"""Folder in it of the files that are to be sent from outside the run's folder."""

Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Whole number of a store."""

Point = tuple[str, float, Whole, Whole]
"""Name, value, time in milliseconds and step."""

Position = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
"""Byte of the run's record that a point begins at."""

_POSITION = TypeAdapter(Position)


def last_position(folder: Path, *, below: int) -> int:
    """Return the last position in the record that a folder's calls have, -1 if they have none.

    Args:
        folder: Folder of the calls.
        below: Size of the record. Positions behind its end are none.
    """
    last = -1
    for call in calls_in(folder):
        with suppress(ValidationError):
            position = _POSITION.validate_python(call.get("at"))
            last = max(last, position if position < below else -1)
    return last


class RunCalls:
    """Puts calls of `MlflowSender` into an outbox.

    Args:
        outbox: Takes the calls.
        folder: Folder of the run.
    """

    def __init__(self, outbox: Outbox, *, folder: Path) -> None:
        self._outbox, self._folder = outbox, folder

    def put(self, call: str, /, **arguments: Any) -> None:
        """Put a call into the outbox."""
        self._outbox.put({"call": call, **arguments})

    def metrics(self, points: Iterable[tuple[str, float, int, int]]) -> None:
        """Log points: name, value, time in milliseconds and step."""
        self.put("metrics", points=[[name, _plain(value), *rest] for name, value, *rest in points])

    def params(self, values: Mapping[str, str]) -> None:
        """Log parameters; one that was logged with another value becomes a tag."""
        self.put("params", values=dict(values))

    def tag(self, key: str, value: object) -> None:
        """Set a tag."""
        self.put("tag", key=key, value=str(value))

    def status(self, status: str | None, time_ms: int | None = None) -> None:
        """Set the status, or end the run by one other than RUNNING."""
        self.put("status", status=status, time=time_ms or now_ms())

    def text(self, text: str, file: str) -> None:
        """Log a text as an artifact."""
        self.put("text", text=text, file=file)

    def files(self, path: Path, *, place: str | None) -> None:
        """Log a file or a folder. One outside the run's folder is copied, since it may be gone when it is sent."""
        self.put("folder" if path.is_dir() else "file", path=self._kept(path), place=place)

    def traces(self, folder: Path, *, count: int) -> None:
        """Log the first episodes of a folder of records as traces."""
        self.put("traces", path=self._kept(folder), count=count)

    def _kept(self, path: Path) -> str:
        """Return a file's path in the run's folder, which may move until it is sent."""
        path = path.absolute()
        if path.is_relative_to(self._folder):
            return str(path.relative_to(self._folder))
        copy = self._folder / FOLDER / COPIES / uuid4().hex / path.name
        copy.parent.mkdir(parents=True)
        if path.is_dir():
            shutil.copytree(path, copy)
        else:
            shutil.copyfile(path, copy)
        return str(copy.relative_to(self._folder))


class QueuedWrites:
    """The writes of MLflow's client to its run, which go through an outbox."""

    _calls: RunCalls

    def log_batch(
        self,
        run_id: str,
        metrics: Sequence[Metric] = (),
        params: Sequence[Param] = (),
        tags: Sequence[RunTag] = (),
        synchronous: bool | None = None,
    ) -> None:
        """Log metrics, parameters and tags."""
        if metrics:
            self._calls.metrics((m.key, m.value, m.timestamp, m.step) for m in metrics)
        if params:
            self._calls.params({param.key: str(param.value) for param in params})
        for tag in tags:
            self._calls.tag(tag.key, tag.value)

    def log_metric(
        self,
        run_id: str,
        key: str,
        value: float,
        timestamp: int | None = None,
        step: int | None = None,
        *_: object,
        **__: object,
    ) -> None:
        """Log a point."""
        self._calls.metrics([(key, value, timestamp or now_ms(), step or 0)])

    def log_param(self, run_id: str, key: str, value: object, *_: object) -> None:
        """Log a parameter; one that was logged with another value becomes a tag."""
        self._calls.params({key: str(value)})

    def set_tag(self, run_id: str, key: str, value: object, *_: object) -> None:
        """Set a tag."""
        self._calls.tag(key, value)

    def update_run(self, run_id: str, status: str | None = None, name: str | None = None) -> None:
        """Set the status."""
        self._calls.status(status)

    def set_terminated(
        self, run_id: str, status: str | None = None, end_time: int | None = None
    ) -> None:
        """End the run."""
        self._calls.status(status or "FINISHED", end_time)

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        """Log a text as an artifact."""
        self._calls.text(text, artifact_file)

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file. One outside the run's folder is copied, since it may be gone when it is sent."""
        self._calls.files(Path(local_path), place=artifact_path)

    def log_artifacts(self, run_id: str, local_dir: str, artifact_path: str | None = None) -> None:
        """Log a folder. One outside the run's folder is copied."""
        self._calls.files(Path(local_dir), place=artifact_path)


class LazyClient(QueuedWrites):
    """`QueuedClient` that loads MLflow when one of its other methods is used first.

    Args:
        uri: Tracking server.
        calls: Takes the writes.
    """

    def __init__(self, uri: str, *, calls: RunCalls) -> None:
        self._uri, self._calls = uri, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loaded, name)

    @cached_property
    def _loaded(self) -> MlflowClient:
        from ragen_pl.tracking.mlflow_outbox import QueuedClient

        return QueuedClient(self._uri, calls=self._calls)


def now_ms() -> int:
    """Return the time in milliseconds."""
    return int(time.time() * 1000)


def _plain(value: float) -> float | str:
    """Return a number as JSON has it: `NaN` and infinite values as text."""
    value = float(value)
    return value if math.isfinite(value) else str(value)
