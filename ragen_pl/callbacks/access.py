"""Typed access to the parts of a Trainer that callbacks read: DataModule, other callbacks, loggers, the record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.loggers import MLFlowLogger

from ragen_pl.base.instances import instances
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.metrics.record import MetricsRecord
from ragen_pl.modules.agent import AgentModule

CallbackT = TypeVar("CallbackT", bound=pl.Callback)


@runtime_checkable
class KeepsFiles(Protocol):
    """Logger that takes files of the run's folder, of the kinds that it can show."""

    def log_files(self, path: Path, *, place: str) -> None:
        """Log a file or a folder under a name."""


@runtime_checkable
class RemovesFiles(Protocol):
    """Logger that removes what `KeepsFiles` has logged."""

    def remove_files(self, place: str) -> None:
        """Remove the files under a name."""


@runtime_checkable
class KeepsTraces(Protocol):
    """Logger that takes episodes, as traces of agent, turns and environment steps."""

    def log_traces(self, folder: Path, *, count: int) -> None:
        """Log the first episodes of a folder of records."""


@runtime_checkable
class RecordsMetrics(Protocol):
    """Logger that writes the run's record of metrics, on the first rank."""

    record: MetricsRecord

    def keep(self, count: int) -> None:
        """Drop all points of the record but the first ones."""


@runtime_checkable
class ReportsRollouts(Protocol):
    """DataModule with the metrics of its last rollout, such as a `RolloutDataModule`."""

    metrics: dict[str, float]


def datamodule_of(trainer: pl.Trainer) -> pl.LightningDataModule | None:
    """Return the Trainer's DataModule, or None if it was given dataloaders."""
    # Lightning sets the attribute only if a DataModule is passed.
    datamodule: pl.LightningDataModule | None = getattr(trainer, "datamodule", None)
    return datamodule


def rollouts_of(trainer: pl.Trainer) -> RolloutDataModule | None:
    """Return the Trainer's DataModule if it plays episodes with an engine; None for another."""
    datamodule = datamodule_of(trainer)
    return datamodule if isinstance(datamodule, RolloutDataModule) else None


def agent_of(pl_module: pl.LightningModule) -> AgentModule | None:
    """Return a module if it is an agent with losses; None for another, such as the warm start's."""
    return pl_module if isinstance(pl_module, AgentModule) else None


def rollout_metrics_of(trainer: pl.Trainer) -> Mapping[str, float]:
    """Return the metrics of the iteration's rollout; empty if the DataModule reports none."""
    datamodule: Any = datamodule_of(trainer)
    return datamodule.metrics if isinstance(datamodule, ReportsRollouts) else {}


def callbacks_of(trainer: pl.Trainer, kind: type[CallbackT]) -> list[CallbackT]:
    """Return the Trainer's callbacks of a class, in order."""
    return instances(trainer.callbacks, kind)  # type: ignore[attr-defined]


def mlflow_loggers(trainer: pl.Trainer) -> list[MLFlowLogger]:
    """Return the Trainer's MLflow loggers."""
    return instances(trainer.loggers, MLFlowLogger)


def record_logger(trainer: pl.Trainer) -> RecordsMetrics | None:
    """Return the logger that writes the run's record; None without one, and on other ranks than the first."""
    loggers = instances(trainer.loggers, RecordsMetrics)
    return next((logger for logger in loggers if logger.record is not None), None)


def log_files(trainer: pl.Trainer, path: Path, *, place: str) -> None:
    """Log a file or a folder of the run's folder with all loggers that take it."""
    for logger in trainer.loggers:
        if isinstance(logger, KeepsFiles):
            logger.log_files(path, place=place)
        elif isinstance(logger, MLFlowLogger):  # Lightning's own
            client = logger.experiment
            log = client.log_artifacts if path.is_dir() else client.log_artifact
            log(str(logger.run_id), str(path), place)


def run_folder(trainer: pl.Trainer) -> Path:
    """Return the run's folder."""
    return Path(str(trainer.default_root_dir))


def run_title(trainer: pl.Trainer) -> str:
    """Return the last two parts of the run's folder, such as `frozenlake/2026-01-01_10-00-00`."""
    return "/".join(run_folder(trainer).parts[-2:])
