"""An evaluation in MLflow: a run nested under the training run, with metrics, tables and episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omegaconf import DictConfig

from ragen_pl.base.records import FILE, read_records
from ragen_pl.config.errors import ConfigError
from ragen_pl.evaluation.report import JSON, MARKDOWN
from ragen_pl.tracking.mlflow_run import (
    accepted_name,
    flattened,
    known_run,
    may_name,
    other_folder,
)
from ragen_pl.viewing.traces import flush_traces, trace_records

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# MLflow's limits: letters of a parameter, parameters and metrics of a request.
_PARAM_LENGTH = 250
_PARAMS_PER_BATCH = 100
_METRICS_PER_BATCH = 1000

T = TypeVar("T")


def tracked_run(cfg: DictConfig) -> dict[str, str] | None:
    """Return `run_id`, `tracking_uri` and `signature` of the training run in MLflow, None without one.

    The server that somebody else's run names is not used.
    """
    if not cfg.mlflow or cfg.source.run is None:
        return None
    run = known_run(Path(cfg.source.run))
    known = run and (cfg.trust or may_name(run, cfg.paths.root))
    return run if known else None


def log_evaluation(
    validation_sets: Mapping[str, Mapping[str, Any]],
    *,
    cfg: Mapping[str, object],
    folder: Path,
    run: Mapping[str, str] | None,
    of: Path | None = None,
) -> str:
    """Log an evaluation and return a text that says where.

    The nested run has the evaluation's settings as parameters, the metrics
    `<validation set>/<policy>/<metric>`, its files as artifacts, and the first `traces` of each validation
    set's written episodes as traces.

    Args:
        validation_sets: Settings and metrics as in `evaluation.json`.
        cfg: Settings of the evaluation.
        folder: Folder of the evaluation's files.
        run: `run_id`, `tracking_uri` and `signature` of the training run; None if it was not logged to MLflow.
        of: Folder of the training run, which has to be that of its MLflow run; None for one that is trusted.

    Raises:
        ConfigError: MLflow does not know the training run, or refuses a request.
    """
    if run is None:
        return "not logged: the training run is not in MLflow, or mlflow=false"
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    client, parent = MlflowClient(run["tracking_uri"]), run["run_id"]
    try:
        found = client.get_run(parent)
        if of is not None and (problem := other_folder(run, found.data.tags, of)) is not None:
            return f"not logged: {problem}"
        experiment = found.info.experiment_id
        tags = {"mlflow.parentRunId": parent, "evaluation": str(folder)}
        child = client.create_run(experiment, run_name=f"evaluation {folder.name}", tags=tags)
        child_id = child.info.run_id
        _log_values(client, child_id, child.info.start_time, cfg, validation_sets)
        # the folder may hold an earlier evaluation, and files of others
        for name in (JSON, MARKDOWN):
            client.log_artifact(child_id, str(folder / name))
        for name in validation_sets:
            file = folder / name / FILE
            if not file.exists():
                continue
            client.log_artifacts(child_id, str(file.parent), name)
            trace_records(
                islice(read_records(file), int(str(cfg["traces"]))),
                images=file.parent,
                uri=run["tracking_uri"],
                experiment_id=experiment,
                run_id=child_id,
            )
        flush_traces()
        client.set_terminated(child_id)
    except MlflowException as error:
        raise ConfigError(
            f"MLflow at {run['tracking_uri']} refused: {str(error).splitlines()[0]}; the tables are in "
            f"{folder}; set mlflow=false to evaluate without it"
        ) from error
    return f"run {child_id}, nested under {parent}"


def _log_values(
    client: MlflowClient,
    run_id: str,
    time: int,
    cfg: Mapping[str, object],
    validation_sets: Mapping[str, Mapping[str, Any]],
) -> None:
    from mlflow.entities import Metric, Param

    settings = {accepted_name(name): value for name, value in flattened(cfg)}
    params = [Param(name, value[:_PARAM_LENGTH]) for name, value in settings.items()]
    metrics = [Metric(name, value, time, 0) for name, value in named_metrics(validation_sets)]
    for some_params in _batches(params, size=_PARAMS_PER_BATCH):
        client.log_batch(run_id, params=some_params)
    for some_metrics in _batches(metrics, size=_METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=some_metrics)


def _batches(items: Sequence[T], *, size: int) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def named_metrics(
    validation_sets: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, float]]:
    """Yield all metrics under names that MLflow accepts."""
    for validation_set, results in validation_sets.items():
        for policy, metrics in results["policies"].items():
            for name, value in metrics.items():
                if isinstance(value, float):
                    given = f"{validation_set}/{policy}/{name}".replace(" ", "_")
                    yield accepted_name(given, instead="_"), value
