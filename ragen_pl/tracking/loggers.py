"""Loggers of a run. Each writes the run's record of metrics, and gives what it tracks the points of the record.

A resumed run repeats the steps since its checkpoint and is bit-identical. A point that was tracked before
is therefore not tracked again, and a curve has one point for each step (`ragen_pl.metrics.record`).
"""

from __future__ import annotations

import logging
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import OmegaConf

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count
from ragen_pl.base.files import disk_errors_of
from ragen_pl.metrics.record import MetricsRecord, Point, RecordReader, entries
from ragen_pl.tracking.mlflow_calls import FOLDER, LazyClient, RunCalls, last_position
from ragen_pl.tracking.mlflow_process import process_of_run
from ragen_pl.tracking.mlflow_run import (
    UNTHINNED,
    check_address,
    check_reachable,
    flattened,
    known_run,
    tracking_uri,
)
from ragen_pl.tracking.outbox import Outbox

if TYPE_CHECKING:
    from ragen_pl.tracking.mlflow_outbox import MlflowSender

log = logging.getLogger(__name__)
# characters; the whole config is kept as an artifact
_PARAM_LENGTH = 250
# seconds to send what is left, at the end of a phase and of the run
_FLUSH_S = 20.0
# to end MLflow's process, which has nothing left to do
_END_S = 5.0
_STOPS = (KeyboardInterrupt, SystemExit, SIGTERMException)
# Lightning adds `epoch` to every point, and the phases of a run count their steps from 0
_NOT_LOGGED = frozenset({"epoch"})


class KeepsRecord(Logger):
    """Base of loggers of one run folder: writes the run's record, and tracks the points that come into it.

    Attributes:
        record: The record; None on other ranks than the first.
    """

    record: MetricsRecord | None = None

    def open_record(self, folder: Path) -> None:
        """Open the record of a run's folder, on the first rank."""
        if not rank_zero_only.rank:  # type: ignore[attr-defined]
            self.record = MetricsRecord(folder.absolute())

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the metrics that have no point at this step."""
        assert self.record is not None
        named = {name: value for name, value in metrics.items() if name not in _NOT_LOGGED}
        for point in self.record.add(named, step or 0):
            self.track(point)

    def track(self, point: Point) -> None:
        """Log a point elsewhere too."""

    @rank_zero_only
    def keep(self, count: int) -> None:
        """Drop all points of the record but the first ones: a resumed run logs the others again."""
        assert self.record is not None
        self.record.keep(count)


class RecordLogger(KeepsRecord):
    """Logger of one run folder that writes the run's record, `metrics.jsonl`, and nothing else.

    Args:
        run_dir: The run's folder.
    """

    needs_trust = ("*",)
    name, version = "record", 0

    def __init__(self, *, run_dir: str) -> None:
        super().__init__()
        self.open_record(Path(run_dir))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Log nothing: the config is in the run's folder."""


class RunLogger(KeepsRecord, MLFlowLogger):
    """MLflow logger of one run folder: one MLflow run, however often it is resumed.

    What is logged goes into files of the folder and is sent from there (`ragen_pl.tracking.outbox`) by a process that
    loads MLflow. A server that is locked, away or deleted does not concern the training. Of the run's record it gets
    all points that it lacks, those before it was switched on too.

    Args:
        run_dir: The run's folder, which stores the id of its MLflow run.
        settings: The resolved config, logged as an artifact and as parameters.
        experiment_name: MLflow's experiment.
        uri: The tracking server; default MLFLOW_TRACKING_URI, else a sqlite file `<root>/mlflow.db`.
        root: Folder of the local store; default `paths.root` of the config, else next to the run.
        every_n_iterations: Iterations between two points of a metric, for runs of many thousands. Those of validations,
            the warm start and alarms are all logged.

    Raises:
        ConfigError: The server of a new run cannot be reached or returns an error.
    """

    needs_trust = ("*",)

    @classmethod
    def check_settings(cls, settings: Mapping[str, Any], *, root: str) -> None:
        """Check that the tracking server can be reached."""
        check_reachable(tracking_uri(root, uri=settings.get("uri")))

    @checked
    def __init__(
        self,
        *,
        run_dir: str,
        settings: Mapping[str, Any] | None = None,
        experiment_name: str = "ragen_pl",
        uri: str | None = None,
        root: str | None = None,
        every_n_iterations: Count = 1,
    ) -> None:
        self.every_n_iterations = every_n_iterations
        self.folder = Path(run_dir).absolute()
        self.settings = dict(settings or {})
        root = root or self.settings.get("paths", {}).get("root") or str(self.folder.parent)
        earlier = known_run(self.folder)
        # a run's start has written the config of a folder that had none, after the same check
        if not uri and not self.settings.get("trust") and (self.folder / "config.yaml").exists():
            check_address(self.folder, root)
        uri = tracking_uri(root, uri=uri) if uri or not earlier else earlier["tracking_uri"]
        self._resumed = earlier.get("tracking_uri") == uri
        # two processes cannot write one outbox; only rank 0 logs
        self._initialized, self._run_id, self._experiment_id = False, earlier.get("run_id"), None
        self._experiment_name, self._tracking_uri, self._log_model = experiment_name, uri, False
        if not rank_zero_only.rank:  # type: ignore[attr-defined]
            self.open_record(self.folder)
            self._open()

    def _open(self) -> None:
        """Create the MLflow run, or go on with it, and log its config."""
        assert self.record is not None
        # a program that has loaded MLflow sends by itself
        self._process = process_of_run()
        start = None if self._resumed else self._start_run()
        calls = self.folder / FOLDER
        trusted = bool(self.settings.get("trust"))
        self._sender = (
            self._process.sender(self.folder, trusted=trusted)
            if self._process
            else sender_of(self.folder, trusted=trusted)
        )
        self._outbox = Outbox(calls, self._sender)
        self._calls = RunCalls(self._outbox, folder=self.folder)
        self._client = LazyClient(self._tracking_uri, calls=self._calls)
        self._initialized = True
        if start is None:
            self._calls.status("RUNNING")
        else:
            self._calls.put("start", **start)
        if self.settings:
            name = "config_resumed.yaml" if start is None else "config.yaml"
            self._calls.text(OmegaConf.to_yaml(OmegaConf.create(self.settings)), name)
            self.log_hyperparams(self.settings)
        # from the last point that an earlier process has put into the outbox
        self._queued = last_position(calls, below=self.record.size)
        self._queue_points()

    def _start_run(self) -> dict[str, Any]:
        where: dict[str, str] = {"experiment": self._experiment_name, "uri": self._tracking_uri}
        if self._process is not None:
            return self._process.start_run(self.folder, **where)
        from ragen_pl.tracking.mlflow_outbox import start_run

        return start_run(self.folder, **where)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """MLflow's client, whose writes to the run go through the outbox too."""
        return self._client

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run. A store that has lost the run gives it a new one when the run is resumed."""
        return self._sender.run_id if self._initialized else self._run_id

    @property
    def experiment_id(self) -> str | None:
        """Id of the MLflow experiment, once the store has answered."""
        return self._sender.experiment_id if self._initialized else None

    @property
    def name(self) -> str:
        """The experiment."""
        return self._experiment_name

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Log parameters, truncated to 250 characters. One that changed on resuming becomes a tag."""
        given = vars(params) if isinstance(params, Namespace) else params
        values = {
            name: value if len(value) <= _PARAM_LENGTH else value[: _PARAM_LENGTH - 1] + "…"
            for name, value in flattened(given)
        }
        self._calls.params(values)

    def track(self, point: Point) -> None:
        """Put the record's new points into the outbox."""
        self._queue_points()

    def _queue_points(self) -> None:
        assert self.record is not None
        for at, _, point in entries(self.record.file, start=max(0, self._queued)):
            if at == self._queued or isinstance(point, int) or not point.tracked:
                continue
            self._queued = at
            # iterations are counted from 1
            is_due = point.step <= 1 or point.step % self.every_n_iterations == 0
            if is_due or any(name.startswith(UNTHINNED) for name in point.metrics):
                self._calls.put("points", at=at, thinned=not is_due)

    @rank_zero_only
    def log_files(self, path: Path, *, place: str) -> None:
        """Log a file or a folder of the run's folder as artifacts. It is read when it is sent."""
        self._calls.files(path, place=place)

    @rank_zero_only
    def remove_files(self, place: str) -> None:
        """Remove the artifacts under a name."""
        self._calls.put("remove", place=place)

    @rank_zero_only
    def log_traces(self, folder: Path, *, count: int) -> None:
        """Log the first episodes of a folder of records as traces."""
        self._calls.traces(folder, count=count)

    @rank_zero_only
    def log_graph(self, model: object, input_array: object = None) -> None:
        """Mark the run as running. Lightning calls this at the start of each fit, and a run has several."""
        self._calls.status("RUNNING")

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Send the remaining records and end the run as finished, failed, or killed if a signal stopped it."""
        if status == "failed" and isinstance(sys.exc_info()[1], _STOPS):
            status = "KILLED"
        names = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}
        self._calls.status(names.get(status, status))
        self._outbox.flush(limit_s=_FLUSH_S)

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Tag the run with the paths of its newest and its best checkpoint."""
        path = checkpoint_callback.last_model_path or checkpoint_callback.best_model_path
        if path:
            tag = "checkpoint" if checkpoint_callback.monitor is None else "best_checkpoint"
            self._calls.tag(tag, Path(path).absolute())
        # a run that is resumed from the checkpoint does not log the points before it again
        self._outbox.synchronize()

    @rank_zero_only
    def close(self) -> None:
        """Send the remaining records; log which are not sent, and the command that sends them."""
        unsent = self._outbox.close(limit_s=_FLUSH_S)
        if self._process is not None:
            self._process.end(limit_s=_END_S if unsent is None else 0.0)
        if unsent is not None:
            log.warning(
                f"MLflow at {self._tracking_uri}: {unsent}; a resumed run sends them, and so does python -m "
                f"ragen_pl.sync run={self.folder}"
            )

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self.folder)


class RunCSVLogger(KeepsRecord, CSVLogger):  # type: ignore[misc]
    """The run's record as CSV files in `<run_dir>/csv`.

    Args:
        run_dir: The run's folder.
        settings: The resolved config, written with the metrics.
    """

    needs_trust = ("*",)

    def __init__(self, *, run_dir: str, settings: Mapping[str, Any] | None = None) -> None:
        # as the record, a line at a time
        CSVLogger.__init__(
            self, save_dir=run_dir, name="", version="csv", flush_logs_every_n_steps=1
        )
        self._settings = dict(settings or {})
        self.open_record(Path(run_dir))
        self._write_again()

    @rank_zero_only
    def _write_again(self) -> None:
        assert self.record is not None
        shutil.rmtree(self.log_dir, ignore_errors=True)
        self._experiment = None
        for point in RecordReader(self.record.folder).points():
            self.experiment.log_metrics(point.metrics, point.step)
        if self._settings:
            self.log_hyperparams(self._settings)
        self.save()

    @rank_zero_only
    def keep(self, count: int) -> None:
        """Drop the points after the first ones of the record, and their rows."""
        super().keep(count)
        self._write_again()

    def track(self, point: Point) -> None:
        """Write a point."""
        CSVLogger.log_metrics(self, dict(point.metrics), point.step)

    @rank_zero_only
    def save(self) -> None:
        """Write the rows."""
        with disk_errors_of(Path(self.experiment.metrics_file_path)):
            super().save()


def sender_of(folder: Path, *, trusted: bool) -> MlflowSender:
    """Return the sender of a run's calls in this process."""
    from ragen_pl.tracking import mlflow_outbox

    mlflow_outbox.quieten()
    return mlflow_outbox.MlflowSender(folder, trusted=trusted)
