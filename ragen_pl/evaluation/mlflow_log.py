"""An evaluation in MLflow: a nested run of the training run, with its metrics, tables and episodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ragen_pl.config.errors import ConfigError
from ragen_pl.run.tracking import flattened
from ragen_pl.viewing.records import FILE, read_records
from ragen_pl.viewing.traces import flush_traces, trace_records

_PARAM_LENGTH = 250


def log_evaluation(
    validation_sets: Mapping[str, Mapping[str, Any]],
    *,
    cfg: Mapping[str, object],
    folder: Path,
    run: Mapping[str, str] | None,
) -> str:
    """Log an evaluation and return where, in words.

    The nested run has its settings as parameters, metrics `<validation set>/<player>/<figure>`, the folder as artifacts,
    and the first `traces` of each validation set's written episodes as traces.

    Args:
        validation sets: as in `evaluation.json`.
        cfg: the evaluation's settings.
        folder: its files.
        run: `run_id` and `tracking_uri` of the training run, None where it has none.

    Raises:
        ConfigError: MLflow does not know the training run, or refuses.
    """
    if run is None:
        return "not logged: the training run is not tracked there, or mlflow=false"
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    client, parent = MlflowClient(run["tracking_uri"]), run["run_id"]
    try:
        experiment = client.get_run(parent).info.experiment_id
        tags = {"mlflow.parentRunId": parent, "evaluation": str(folder)}
        child = client.create_run(experiment, run_name=f"evaluation {folder.name}", tags=tags)
        child_id, now = child.info.run_id, child.info.start_time
        params = [Param(name, value[:_PARAM_LENGTH]) for name, value in flattened(cfg)]
        metrics = [Metric(name, value, now, 0) for name, value in metric_names(validation_sets)]
        for first in range(0, len(params), 100):  # as many as MLflow takes at once
            client.log_batch(child_id, params=params[first : first + 100])
        for first in range(0, len(metrics), 1000):
            client.log_batch(child_id, metrics=metrics[first : first + 1000])
        client.log_artifacts(child_id, str(folder))
        for file in sorted(folder.glob(f"*/{FILE}")):
            trace_records(
                islice(read_records(file), int(str(cfg["traces"]))), images=file.parent,
                uri=run["tracking_uri"], experiment_id=experiment, run_id=child_id,
            )  # fmt: skip
        flush_traces()
        client.set_terminated(child_id)
    except MlflowException as error:
        raise ConfigError(
            f"MLflow at {run['tracking_uri']} refused: {str(error).splitlines()[0]}; the tables are in "
            f"{folder}; set mlflow=false to go without"
        ) from error
    return f"run {child_id}, nested under {parent}"


def metric_names(validation_sets: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield every figure under a name that MLflow takes."""
    for validation_set, told in validation_sets.items():
        for policy_name, figures in told["policies"].items():
            for name, value in figures.items():
                if isinstance(value, float):
                    yield re.sub(r"[^\w/.-]", "_", f"{validation_set}/{policy_name}/{name}"), value
