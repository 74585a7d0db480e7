"""A run's MLflow client whose writes are kept on disk and sent by a thread: `ragen_pl.tracking.outbox`."""

from __future__ import annotations

import math
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient
from sqlalchemy import event
from sqlalchemy.engine import Engine

from ragen_pl.base.foreign_files import ForeignFileError, check_plain
from ragen_pl.tracking.mlflow_run import check_reachable, known_run, write_run_file
from ragen_pl.tracking.outbox import Call, Outbox, RefusedError, calls_in
from ragen_pl.viewing.records import FILE, read_records
from ragen_pl.viewing.traces import flush_traces, trace_records

FOLDER = "mlflow"
"""Folder of the calls in a run's folder."""

_COPIES = "files"
# MLflow's limits of a request
_PARAMS_PER_BATCH, _METRICS_PER_BATCH = 100, 1000
_VIEW = "mlflow.experimentKind"
_NOT_FOUND = "RESOURCE_DOES_NOT_EXIST"
_REFUSED = ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS")


class QueuedClient(MlflowClient):
    """MLflow client whose writes to its run go through an outbox. The other methods are MLflow's own.

    Args:
        uri: Tracking server.
        folder: Folder of the run.
        outbox: Takes the calls.
    """

    def __init__(self, uri: str, *, folder: Path, outbox: Outbox) -> None:
        super().__init__(uri)
        self._folder, self._outbox = folder, outbox

    def put(self, call: str, /, **arguments: Any) -> None:
        """Put a call of `MlflowSender` into the outbox."""
        self._outbox.put({"call": call, **arguments})

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
            self.put(
                "metrics", points=[[m.key, _plain(m.value), m.timestamp, m.step] for m in metrics]
            )
        if params:
            self.put("params", values={param.key: str(param.value) for param in params})
        for tag in tags:
            self.put("tag", key=tag.key, value=str(tag.value))

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
        self.log_batch(run_id, [Metric(key, value, timestamp or _now_ms(), step or 0)])

    def log_param(self, run_id: str, key: str, value: object, *_: object) -> None:
        """Log a parameter; one that was logged with another value becomes a tag."""
        self.log_batch(run_id, params=[Param(key, str(value))])

    def set_tag(self, run_id: str, key: str, value: object, *_: object) -> None:
        """Set a tag."""
        self.put("tag", key=key, value=str(value))

    def update_run(self, run_id: str, status: str | None = None, name: str | None = None) -> None:
        """Set the status."""
        self.put("status", status=status, time=_now_ms())

    def set_terminated(
        self, run_id: str, status: str | None = None, end_time: int | None = None
    ) -> None:
        """End the run."""
        self.put("status", status=status or "FINISHED", time=end_time or _now_ms())

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        """Log a text as an artifact."""
        self.put("text", text=text, file=artifact_file)

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str | None = None) -> None:
        """Log a file. One outside the run's folder is copied, since it may be gone when it is sent."""
        self.put("file", path=self._kept(Path(local_path)), place=artifact_path)

    def log_artifacts(self, run_id: str, local_dir: str, artifact_path: str | None = None) -> None:
        """Log a folder. One outside the run's folder is copied."""
        self.put("folder", path=self._kept(Path(local_dir)), place=artifact_path)

    def log_traces(self, folder: Path, *, count: int) -> None:
        """Log the first episodes of a folder of records as traces."""
        self.put("traces", path=self._kept(folder), count=count)

    def _kept(self, path: Path) -> str:
        """Return a file's path in the run's folder, which may move until it is sent."""
        path = path.absolute()
        if path.is_relative_to(self._folder):
            return str(path.relative_to(self._folder))
        copy = self._folder / FOLDER / _COPIES / uuid4().hex / path.name
        copy.parent.mkdir(parents=True)
        if path.is_dir():
            shutil.copytree(path, copy)
        else:
            shutil.copyfile(path, copy)
        return str(copy.relative_to(self._folder))


class MlflowSender:
    """Sends the calls of a `QueuedClient`. A store that has lost the run gets a new one, with all calls.

    Sending a call again changes nothing: MLflow keeps one of several points with the same time, step and value.

    Args:
        folder: Folder of the run, with its `RUN_FILE`.
    """

    def __init__(self, folder: Path) -> None:
        known = known_run(folder)
        self.folder, self.uri, self.run_id = folder, known["tracking_uri"], known["run_id"]
        self.experiment_id: str | None = None
        self._client: Any = None
        self._sends: dict[str, Callable[..., None]] = {
            "start": self._send_start,
            "metrics": self._send_metrics,
            "params": self._send_params,
            "tag": self._send_tag,
            "status": self._send_status,
            "text": self._send_text,
            "file": self._send_file,
            "folder": self._send_folder,
            "traces": self._send_traces,
            "remove": self._send_remove,
        }

    def begin(self) -> bool:
        """Find the run; return whether it is a new one."""
        # MLflow itself would repeat a request for minutes
        check_reachable(self.uri)
        self._client = MlflowClient(self.uri)
        try:
            self.experiment_id = self._client.get_run(self.run_id).info.experiment_id
        except MlflowException as error:
            start = next(calls_in(self.folder / FOLDER), {})
            if error.error_code != _NOT_FOUND or start.get("call") != "start":
                raise
            self.run_id, self.experiment_id = create_run(self._client, start)
            write_run_file(self.folder, run_id=self.run_id, uri=self.uri)
            return True
        return False

    def send(self, call: Call) -> None:
        """Send a call.

        Raises:
            RefusedError: MLflow does not accept it, or its file is gone.
        """
        arguments = {name: value for name, value in call.items() if name != "call"}
        try:
            self._sends[call["call"]](**arguments)
            self._remove_copy(arguments.get("path"))
        except FileNotFoundError as error:
            raise RefusedError(f"{error.filename} is gone") from error
        except NotImplementedError as error:  # of stores that remove nothing
            raise RefusedError(f"{call['call']}: {error}") from error
        except MlflowException as error:
            if error.error_code not in _REFUSED:
                # the store may be at fault: that is trouble, and raises
                self._client.get_run(self.run_id)
                if error.error_code != "BAD_REQUEST":
                    raise
            raise RefusedError(str(error).splitlines()[0]) from error

    def _inside(self, path: str) -> Path:
        """Return a file or folder of the run's folder, which no link leads to and which holds none.

        Raises:
            RefusedError: It is elsewhere, as in a folder that somebody else has prepared.
        """
        folder = self.folder.resolve()
        inside = folder / path
        if inside.resolve() != inside or not inside.is_relative_to(folder):
            raise RefusedError(f"{path} is not in the run's folder")
        try:
            check_plain(inside)
        except ForeignFileError as error:
            raise RefusedError(str(error)) from error
        return inside

    def _remove_copy(self, path: str | None) -> None:
        copies = (self.folder / FOLDER / _COPIES).resolve()
        if path is not None and self._inside(path).parent.parent == copies:
            shutil.rmtree(self._inside(path).parent, ignore_errors=True)

    def _send_start(self, **_: Any) -> None:
        """Do nothing: the call is for a store without the run."""

    def _send_metrics(self, points: list[list[Any]]) -> None:
        metrics = [Metric(key, float(value), at, step) for key, value, at, step in points]
        for first in range(0, len(metrics), _METRICS_PER_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + _METRICS_PER_BATCH])

    def _send_params(self, values: dict[str, str]) -> None:
        logged = self._client.get_run(self.run_id).data.params
        new = [Param(name, text) for name, text in values.items() if name not in logged]
        for first in range(0, len(new), _PARAMS_PER_BATCH):
            self._client.log_batch(self.run_id, params=new[first : first + _PARAMS_PER_BATCH])
        for name, text in values.items():
            # parameters cannot change, and a run may be resumed with another `trainer.max_epochs`
            if logged.get(name, text) != text:
                self._client.set_tag(self.run_id, f"resumed.{name}", text)

    def _send_tag(self, key: str, value: str) -> None:
        self._client.set_tag(self.run_id, key, value)

    def _send_status(self, status: str, time: int) -> None:
        if status == "RUNNING":
            self._client.update_run(self.run_id, status=status)
        else:
            self._client.set_terminated(self.run_id, status, time)

    def _send_text(self, text: str, file: str) -> None:
        self._client.log_text(self.run_id, text, file)

    def _send_file(self, path: str, place: str | None) -> None:
        self._client.log_artifact(self.run_id, str(self._inside(path)), place)

    def _send_folder(self, path: str, place: str | None) -> None:
        self._client.log_artifacts(self.run_id, str(self._inside(path)), place)

    def _send_traces(self, path: str, count: int) -> None:
        # traces are exported by MLflow's own threads, whose errors it swallows: ask before
        self._client.get_run(self.run_id)
        folder = self._inside(path)
        trace_records(
            islice(read_records(folder / FILE), count),
            images=folder,
            uri=self.uri,
            experiment_id=str(self.experiment_id),
            run_id=self.run_id,
        )
        flush_traces()

    def _send_remove(self, place: str) -> None:
        run = self._client.get_run(self.run_id)
        get_artifact_repository(run.info.artifact_uri).delete_artifacts(place)


def client_of_new_store(uri: str) -> MlflowClient:
    """Return the client of a store that does not exist yet, and create its tables.

    MLflow creates them in hundreds of commits. None of them waits for the disk; later commits do.
    """
    with _quick_commits():
        return MlflowClient(uri)


@contextmanager
def _quick_commits() -> Iterator[None]:
    """Let commits not wait for the disk on the connections to sqlite that are opened in the block, until its end."""
    opened: list[Any] = []

    def hurry(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA synchronous=OFF")
        opened.append(connection)

    event.listen(Engine, "connect", hurry)
    try:
        yield
    finally:
        event.remove(Engine, "connect", hurry)
        for connection in opened:
            with suppress(sqlite3.ProgrammingError):  # closed meanwhile
                connection.execute("PRAGMA synchronous=FULL")


def create_run(client: Any, start: Call) -> tuple[str, str]:
    """Create a run, and its experiment if there is none; return the ids of both.

    Args:
        client: MLflow's client.
        start: `experiment` and `name`, the `tags`, and `artifacts`, the place of a new experiment's files.
    """
    experiment = client.get_experiment_by_name(start["experiment"])
    if experiment is None or experiment.lifecycle_stage == "deleted":
        experiment_id = client.create_experiment(
            start["experiment"], artifact_location=start["artifacts"]
        )
        chosen = False
    else:
        experiment_id, chosen = experiment.experiment_id, _VIEW in experiment.tags
    if not chosen:
        # MLflow's page opens on runs and charts: with traces it opens on the view of chat applications
        client.set_experiment_tag(experiment_id, _VIEW, "custom_model_development")
    run = client.create_run(experiment_id, run_name=start["name"], tags=dict(start["tags"]))
    return str(run.info.run_id), str(experiment_id)


def _plain(value: float) -> float | str:
    """Return a number as JSON has it: `NaN` and infinite values as text."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _now_ms() -> int:
    return int(time.time() * 1000)
