"""MLflow's part of a run: its creation, and the calls of `ragen_pl.tracking.mlflow_calls`.

MLflow takes seconds to load. Runs load it in a process of its own, see `ragen_pl.tracking.mlflow_process`.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient
from mlflow.utils.uri import validate_path_is_safe
from pydantic import AfterValidator, Field, StrictBool, ValidationError, validate_call
from sqlalchemy import event
from sqlalchemy.engine import Engine

from ragen_pl.base.constraints import CountOrZero
from ragen_pl.base.error_text import named_error
from ragen_pl.base.foreign_files import ForeignFileError, check_plain
from ragen_pl.base.records import FILE, read_records
from ragen_pl.checkpoints.lock import one_at_a_time
from ragen_pl.config.errors import ConfigError
from ragen_pl.metrics.record import FILE as RECORD
from ragen_pl.metrics.record import point_at
from ragen_pl.tracking.mlflow_calls import (
    COPIES,
    FOLDER,
    Point,
    Position,
    QueuedWrites,
    RunCalls,
    Whole,
)
from ragen_pl.tracking.mlflow_run import (
    RUN_DIR,
    UNTHINNED,
    OtherRunError,
    accepted_name,
    check_reachable,
    known_run,
    other_folder,
    version_tags,
    write_run_file,
)
from ragen_pl.tracking.outbox import Call, RefusedError, calls_in
from ragen_pl.viewing.traces import flush_traces, trace_records

# MLflow's limits of a request
_PARAMS_PER_BATCH, _METRICS_PER_BATCH = 100, 1000
_VIEW = "mlflow.experimentKind"
_Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED", "SCHEDULED"]
_NOT_FOUND = "RESOURCE_DOES_NOT_EXIST"
_REFUSED = ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS")


def _of_the_run(place: str) -> str:
    try:
        return str(validate_path_is_safe(place))
    except MlflowException as error:
        raise ValueError(f"{place[:60]!r} is not among the artifacts of a run") from error


# of arguments of a call: a file or folder of artifacts
_Place = Annotated[str, Field(min_length=1), AfterValidator(_of_the_run)]


class QueuedClient(QueuedWrites, MlflowClient):
    """MLflow client whose writes to its run go through an outbox. The other methods are MLflow's own.

    Args:
        uri: Tracking server.
        calls: Takes the writes.
    """

    def __init__(self, uri: str, *, calls: RunCalls) -> None:
        MlflowClient.__init__(self, uri)
        self._calls = calls


class MlflowSender:
    """Sends the calls of a `QueuedClient`. A store that has lost the run gets a new one, with all calls.

    Sending a call again changes nothing: MLflow keeps one of several points with the same time, step and value.

    The calls may be somebody else's, in a folder that names one's own store. Their arguments are held against the
    annotations of the methods below: they name artifacts of their run only, and never where a store keeps them.

    Args:
        folder: Folder of the run, with its `RUN_FILE`.
        trusted: Whether it is taken at its word that the MLflow run is its own.
    """

    def __init__(self, folder: Path, *, trusted: bool = False) -> None:
        self._known, self._trusted = known_run(folder), trusted
        self.folder, self.uri = folder, self._known["tracking_uri"]
        self.run_id = self._known["run_id"]
        self.experiment_id: str | None = None
        self._client: Any = None
        sends: dict[str, Callable[..., None]] = {
            "start": self._send_start,
            "points": self._send_points,
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
        self._sends = {name: validate_call(send) for name, send in sends.items()}

    def check(self) -> None:
        """Check that the run is that of the folder, where the server answers and knows it.

        Raises:
            OtherRunError: It is that of another one.
        """
        try:
            check_reachable(self.uri)
            tags = MlflowClient(self.uri).get_run(self.run_id).data.tags
        except (ConfigError, MlflowException):
            return  # as `begin` tells
        self._check_folder(tags)

    def begin(self) -> bool:
        """Find the run; return whether it is a new one.

        Raises:
            OtherRunError: The run is that of another folder.
        """
        # MLflow itself would repeat a request for minutes
        check_reachable(self.uri)
        self._client = MlflowClient(self.uri)
        try:
            run = self._client.get_run(self.run_id)
        except MlflowException as error:
            start = next(calls_in(self.folder / FOLDER), {})
            if error.error_code != _NOT_FOUND or start.get("call") != "start":
                raise
            self.send(start)  # checks it
            tags = {**start["tags"], RUN_DIR: str(self.folder)}
            self.run_id, self.experiment_id = create_run(
                self._client, {**start, "tags": tags}, uri=self.uri
            )
            write_run_file(self.folder, run_id=self.run_id, uri=self.uri)
            return True
        self._check_folder(run.data.tags)
        self.experiment_id = run.info.experiment_id
        if run.data.tags.get(RUN_DIR) != str(self.folder):  # it was moved
            self._client.set_tag(self.run_id, RUN_DIR, str(self.folder))
        return False

    def _check_folder(self, tags: Mapping[str, str]) -> None:
        problem = other_folder(self._known, tags, self.folder)
        if problem is not None and not self._trusted:
            raise OtherRunError(problem)

    def send(self, call: Call) -> None:
        """Send a call.

        Raises:
            RefusedError: It is none, MLflow does not accept it, or its file is gone.
        """
        arguments = {name: value for name, value in call.items() if name != "call"}
        name = str(call.get("call"))
        if name not in self._sends:
            raise RefusedError(f"call={name[:60]}: expected one of {', '.join(self._sends)}")
        try:
            self._sends[name](**arguments)
            self._remove_copy(arguments.get("path"))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, (name, *first["loc"])))
            raise RefusedError(f"{place}: {first['msg']}") from error
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
        copies = (self.folder / FOLDER / COPIES).resolve()
        if path is not None and self._inside(path).parent.parent == copies:
            shutil.rmtree(self._inside(path).parent, ignore_errors=True)

    def _send_start(
        self, experiment: str, name: str, tags: dict[str, str], artifacts: str | None = None
    ) -> None:
        """Do nothing: the call is for a store without the run. `artifacts` is of an earlier version."""

    def _send_points(self, at: Position, thinned: StrictBool) -> None:
        """Send a point of the run's record, whose line begins at a byte of it."""
        point = point_at(self._inside(RECORD), at)
        if point is None or point.time is None:
            raise RefusedError(f"{RECORD}: no point at byte {at}")
        now = int(1000 * point.time)
        # as the arguments of a call are, the numbers of the record are checked
        self._sends["metrics"](
            points=[
                (accepted_name(name), value, now, point.step)
                for name, value in point.metrics.items()
                if not thinned or name.startswith(UNTHINNED)
            ]
        )

    def _send_metrics(self, points: list[Point]) -> None:
        metrics = [Metric(*point) for point in points]
        for first in range(0, len(metrics), _METRICS_PER_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + _METRICS_PER_BATCH])

    def _send_params(self, values: dict[str, str]) -> None:
        values = {accepted_name(name): text for name, text in values.items()}
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

    def _send_status(self, status: _Status, time: Whole) -> None:
        if status == "RUNNING":
            self._client.update_run(self.run_id, status=status)
        else:
            self._client.set_terminated(self.run_id, status, time)

    def _send_text(self, text: str, file: _Place) -> None:
        self._client.log_text(self.run_id, text, file)

    def _send_file(self, path: str, place: _Place | None) -> None:
        self._client.log_artifact(self.run_id, str(self._inside(path)), place)

    def _send_folder(self, path: str, place: _Place | None) -> None:
        self._client.log_artifacts(self.run_id, str(self._inside(path)), place)

    def _send_traces(self, path: str, count: CountOrZero) -> None:
        # traces are exported by MLflow's own threads, whose errors it swallows: ask before
        self._client.get_run(self.run_id)
        folder = self._inside(path)
        try:
            trace_records(
                islice(read_records(folder / FILE), count),
                images=folder,
                uri=self.uri,
                experiment_id=str(self.experiment_id),
                run_id=self.run_id,
            )
        # of records that are damaged, or of another version: they stay so, and the calls after it must not wait
        except (ValueError, KeyError, TypeError) as error:
            raise RefusedError(f"traces of {path}: {named_error(error)}") from error
        flush_traces()

    def _send_remove(self, place: _Place) -> None:
        run = self._client.get_run(self.run_id)
        try:
            get_artifact_repository(run.info.artifact_uri).delete_artifacts(place)
        # of a store of any kind, such as one that lets nobody delete: the calls after it must not wait for that
        except Exception as error:
            raise RefusedError(f"remove {place}: {' '.join(str(error).split())}") from error


def start_run(folder: Path, *, experiment: str, uri: str) -> dict[str, Any]:
    """Create a run's MLflow run; return the arguments of its creation. Calls of an earlier one are removed.

    Args:
        folder: The run's folder.
        experiment: MLflow's experiment.
        uri: Tracking server.

    Raises:
        ConfigError: The server cannot be reached or returns an error.
    """
    check_reachable(uri)
    store = store_of(uri)
    if store is not None:
        store.parent.mkdir(parents=True, exist_ok=True)
    start: dict[str, Any] = {
        "experiment": experiment,
        "name": "/".join(folder.parts[-2:]),
        "tags": {**version_tags(), RUN_DIR: str(folder)},
    }
    try:
        if store is None:
            run_id, _ = create_run(MlflowClient(uri), start, uri=uri)
        else:
            # runs that begin together would all create the tables
            with one_at_a_time(store.with_suffix(".lock")):
                client = MlflowClient(uri) if store.exists() else client_of_new_store(uri)
                run_id, _ = create_run(client, start, uri=uri)
    except MlflowException as error:
        raise ConfigError(
            f"MLflow at {uri} refused: {str(error).splitlines()[0]}; repair the store, unset "
            "MLFLOW_TRACKING_URI for a local one, or set logger=none"
        ) from error
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    write_run_file(folder, run_id=run_id, uri=uri)
    return start


def quieten() -> None:
    """Suppress the messages of creating a store."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)


def store_of(uri: str) -> Path | None:
    """Return the file of a local store, None for another one."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


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


def create_run(client: Any, start: Call, *, uri: str) -> tuple[str, str]:
    """Create a run, and its experiment if there is none; return the ids of both.

    Args:
        client: MLflow's client.
        start: `experiment` and `name`, and the `tags`.
        uri: Tracking server. The files of an experiment in a local store are next to it.
    """
    store = store_of(uri)
    artifacts = None if store is None else (store.parent / "mlartifacts").as_uri()
    experiment = client.get_experiment_by_name(start["experiment"])
    if experiment is None or experiment.lifecycle_stage == "deleted":
        experiment_id = client.create_experiment(start["experiment"], artifact_location=artifacts)
        chosen = False
    else:
        experiment_id, chosen = experiment.experiment_id, _VIEW in experiment.tags
    if not chosen:
        # MLflow's page opens on runs and charts: with traces it opens on the view of chat applications
        client.set_experiment_tag(experiment_id, _VIEW, "custom_model_development")
    run = client.create_run(experiment_id, run_name=start["name"], tags=dict(start["tags"]))
    return str(run.info.run_id), str(experiment_id)
