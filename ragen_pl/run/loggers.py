"""Loggers of a run: MLflow, and CSV files. Both continue the curves of an interrupted run.

A resumed run repeats the steps since its checkpoint and is bit-identical. A point that was logged before
is therefore not logged again, and a curve has one point for each step.
"""

from __future__ import annotations

import csv
import json
import logging
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import OmegaConf

from ragen_pl.config.errors import ConfigError
from ragen_pl.files import atomic_write
from ragen_pl.run.tracking import (
    RUN_FILE,
    check_reachable,
    flattened,
    known_run,
    tracking_uri,
    version_tags,
)

# characters; the whole config is kept as an artifact
_PARAM_LENGTH = 250
_STOPS = (KeyboardInterrupt, SystemExit, SIGTERMException)
_VIEW = "mlflow.experimentKind"
# Lightning adds `epoch` to every point, and the phases of a run count their steps from 0
_NOT_LOGGED = frozenset({"epoch"})


class RunLogger(MLFlowLogger):
    """MLflow logger of one run folder: one MLflow run, however often it is resumed.

    Args:
        run_dir: the run's folder, which stores the id of its MLflow run.
        settings: the resolved config, logged as an artifact and as parameters.
        experiment_name: MLflow's experiment.
        uri: the tracking server; default MLFLOW_TRACKING_URI, else a sqlite file `<root>/mlflow.db`.
        root: folder of the local store; default `paths.root` of the config, else next to the run.

    Raises:
        ConfigError: the server cannot be reached or returns an error.
    """

    @classmethod
    def check_settings(cls, settings: Mapping[str, Any], *, root: str) -> None:
        """Check that the tracking server can be reached."""
        check_reachable(tracking_uri(root, uri=settings.get("uri")))

    def __init__(
        self,
        *,
        run_dir: str,
        settings: Mapping[str, Any] | None = None,
        experiment_name: str = "ragen_pl",
        uri: str | None = None,
        root: str | None = None,
    ) -> None:
        self.folder = Path(run_dir).absolute()
        self.settings = dict(settings or {})
        root = root or self.settings.get("paths", {}).get("root") or str(self.folder.parent)
        earlier = known_run(self.folder)
        uri = tracking_uri(root, uri=uri) if uri or not earlier else earlier["tracking_uri"]
        resumed = earlier.get("run_id") if earlier.get("tracking_uri") == uri else None
        self._logged_steps: dict[str, set[int]] = {}
        self._resumed = resumed is not None
        if rank_zero_only.rank:  # type: ignore[attr-defined]
            # two processes cannot create one sqlite store; only rank 0 logs
            self._initialized, self._run_id, self._experiment_id = False, resumed, None
            self._tracking_uri, self._log_model = uri, False
            return
        _quieten_mlflow()
        check_reachable(uri)
        artifacts = None
        if uri.startswith("sqlite:///"):
            store = Path(uri.removeprefix("sqlite:///")).parent
            store.mkdir(parents=True, exist_ok=True)
            artifacts = (store / "mlartifacts").as_uri()
        self._connect(experiment_name, uri=uri, run_id=resumed, artifacts=artifacts)

    def _connect(
        self, experiment_name: str, *, uri: str, run_id: str | None, artifacts: str | None
    ) -> None:
        from mlflow.exceptions import MlflowException

        try:
            super().__init__(
                experiment_name=experiment_name,
                run_name="/".join(self.folder.parts[-2:]),
                tracking_uri=uri,
                artifact_location=artifacts,
                run_id=run_id,
                tags={**version_tags(), "run_dir": str(self.folder)},
            )
            self._ensure_run()
            self._prefer_training_view()
        except MlflowException as error:
            raise ConfigError(
                f"MLflow at {uri} refused: {str(error).splitlines()[0]}; repair the store, unset "
                "MLFLOW_TRACKING_URI for a local one, or set logger=none"
            ) from error

    def _prefer_training_view(self) -> None:
        """Have MLflow's page open on runs and charts: with traces it opens on the view of chat applications."""
        experiment = self.experiment.get_experiment(self.experiment_id)
        if _VIEW not in experiment.tags:
            self.experiment.set_experiment_tag(
                self.experiment_id, _VIEW, "custom_model_development"
            )

    def _ensure_run(self) -> None:
        """Create the MLflow run or reopen it, and log its config."""
        run_id = self.run_id
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.folder / RUN_FILE) as file:
            file.write_text(json.dumps({"run_id": run_id, "tracking_uri": self._tracking_uri}))
        if self._resumed:
            self.experiment.update_run(run_id, status="RUNNING")
        if self.settings:
            name = "config_resumed.yaml" if self._resumed else "config.yaml"
            self.experiment.log_text(
                run_id, OmegaConf.to_yaml(OmegaConf.create(self.settings)), name
            )
            self.log_hyperparams(self.settings)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Log parameters, truncated to 250 characters. One that changed on resuming becomes a tag.

        MLflow's parameters cannot change, and a run may be resumed with another `trainer.max_epochs`.
        """
        from mlflow.entities import Param

        given = vars(params) if isinstance(params, Namespace) else params
        logged = self.experiment.get_run(self.run_id).data.params
        new: list[Param] = []
        for name, value in flattened(given):
            text = value if len(value) <= _PARAM_LENGTH else value[: _PARAM_LENGTH - 1] + "…"
            if name not in logged:
                new.append(Param(name, text))
            elif logged[name] != text:
                self.experiment.set_tag(self.run_id, f"resumed.{name}", text)
        # MLflow accepts 100 parameters at once
        for first in range(0, len(new), 100):
            self.experiment.log_batch(self.run_id, params=new[first : first + 100])

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the metrics that have no point at this step."""
        new = {
            name: value
            for name, value in metrics.items()
            if name not in _NOT_LOGGED and not (self._resumed and step in self._steps(name))
        }
        if new:
            super().log_metrics(new, step)

    def _steps(self, name: str) -> set[int]:
        """Return the steps at which the run logged a metric before it was resumed. They are read once."""
        if name not in self._logged_steps:
            points = self.experiment.get_metric_history(self.run_id, name)
            self._logged_steps[name] = {point.step for point in points}
        return self._logged_steps[name]

    @rank_zero_only
    def log_graph(self, model: object, input_array: object = None) -> None:
        """Mark the run as running. Lightning calls this at the start of each fit, and a run has several."""
        self.experiment.update_run(self.run_id, status="RUNNING")

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """End the run as finished, failed, or killed if a signal stopped it."""
        if status == "failed" and isinstance(sys.exc_info()[1], _STOPS):
            status = "KILLED"
        super().finalize(status)

    @rank_zero_only
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Tag the run with the paths of its newest and its best checkpoint."""
        path = checkpoint_callback.last_model_path or checkpoint_callback.best_model_path
        if path:
            tag = "checkpoint" if checkpoint_callback.monitor is None else "best_checkpoint"
            self.experiment.set_tag(self.run_id, tag, str(Path(path).absolute()))

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self.folder)


class RunCSVLogger(CSVLogger):
    """CSV files in `<run_dir>/csv`, which a resumed run continues.

    Args:
        run_dir: the run's folder.
        settings: the resolved config, written with the metrics.
    """

    def __init__(self, *, run_dir: str, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(save_dir=run_dir, name="", version="csv")
        self._logged: set[tuple[str, str]] = set()
        if rank_zero_only.rank:  # type: ignore[attr-defined]
            return
        earlier = self._earlier_rows(Path(self.log_dir) / "metrics.csv")
        self.experiment.metrics = list(earlier)
        self._logged = {(name, row["step"]) for row in earlier for name in row}
        if settings:
            self.log_hyperparams(dict(settings))
        self.save()

    def _earlier_rows(self, file: Path) -> list[dict[str, str]]:
        """Return the rows written before the run was resumed. Lightning's writer would delete them."""
        if not file.exists():
            return []
        with file.open(newline="") as stream:
            rows = [
                {name: value for name, value in row.items() if value}
                for row in csv.DictReader(stream)
            ]
        file.replace(Path(self.save_dir) / "metrics_before_resume.csv")
        (file.parent / "hparams.yaml").unlink(missing_ok=True)
        return rows

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log the metrics that have no value at this step."""
        new = {
            name: value
            for name, value in metrics.items()
            if name not in _NOT_LOGGED and (name, str(step)) not in self._logged
        }
        if new:
            super().log_metrics(new, step)


def _quieten_mlflow() -> None:
    """Suppress the messages of creating a store."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.loggers.mlflow").setLevel(logging.ERROR)
