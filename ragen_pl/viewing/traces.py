"""Episodes as MLflow traces: an agent span with its turns and the environment's steps, images attached.

MLflow exports traces in threads of its own, so a run does not wait. `flush_traces` waits once, at the end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ragen_pl.base.records import read_image

# The metadata by which MLflow shows a trace under its run.
_SOURCE_RUN = "mlflow.sourceRun"
_STORE_VARIABLE = "MLFLOW_TRACKING_URI"
_TAGS = ("iteration", "validation_set", "policy", "group", "member", "success", "status")


def trace_records(
    records: Iterable[Mapping[str, Any]],
    *,
    images: Path,
    uri: str,
    experiment_id: str,
    run_id: str,
) -> int:
    """Log a trace for each record under a run and return the number of traces.

    Args:
        records: Records of `ragen_pl.base.records`.
        images: Folder that the records' image paths start from.
        uri: Tracking store.
        experiment_id: Experiment of the run.
        run_id: MLflow run.
    """
    logging.getLogger("mlflow.tracing.export.async_export_queue").setLevel(logging.WARNING)
    _set_store(uri)
    count = 0
    for record in records:
        _trace(record, images=images, experiment_id=experiment_id, run_id=run_id)
        count += 1
    return count


def _set_store(uri: str) -> None:
    """Select the tracking store; spans take no client, so it is a setting of the process.

    MLflow also sets its environment variable. That is undone: another run of this process would take it
    for a choice of the user.
    """
    import mlflow

    variable = os.environ.get(_STORE_VARIABLE)
    mlflow.set_tracking_uri(uri)
    if variable is None:
        os.environ.pop(_STORE_VARIABLE, None)
    else:
        os.environ[_STORE_VARIABLE] = variable


def flush_traces() -> None:
    """Wait until the traces logged so far are stored."""
    import mlflow

    mlflow.flush_trace_async_logging()


def _trace(record: Mapping[str, Any], *, images: Path, experiment_id: str, run_id: str) -> None:
    import mlflow
    from mlflow.entities import SpanType

    if record["validation_set"] is None:
        origin = f"iteration {record['iteration']}"
    else:
        origin = f"validation set {record['validation_set']}"
    root = mlflow.start_span_no_context(
        f"{record['policy']}, {origin}",
        span_type=SpanType.AGENT,
        inputs={name: record[name] for name in ("seed", "group", "member", "difficulty")},
        tags={name: str(record[name]) for name in _TAGS if record[name] is not None},
        metadata={_SOURCE_RUN: run_id},
        experiment_id=experiment_id,
    )
    for turn in record["turns"]:
        _trace_turn(turn, root=root, images=images)
    outputs = {name: record[name] for name in ("success", "return", "status", "error")}
    root.end(outputs=outputs | {"images": _attached(record["final_images"], images)})


def _trace_turn(turn: Mapping[str, Any], *, root: Any, images: Path) -> None:
    import mlflow
    from mlflow.entities import SpanType

    span = mlflow.start_span_no_context(
        f"turn {turn['turn']}",
        span_type=SpanType.LLM,
        parent_span=root,
        inputs={
            "observation": turn["observation"],
            "images": _attached(turn["images"], images),
            "prompt": turn["prompt_text"],
        },
    )
    span.set_attributes(
        {
            "prompt_tokens": len(turn["prompt_ids"]),
            "response_tokens": len(turn["response_ids"]),
            "temperature": turn["temperature"],
            "entropy": turn["entropy"],
            "logprob": sum(turn["logprobs"]),
        }
    )
    step = mlflow.start_span_no_context(
        "environment step",
        span_type=SpanType.TOOL,
        parent_span=span,
        inputs={"actions": turn["actions"]},
    )
    info = {name: str(value) for name, value in turn["info"].items()}
    step.end(
        outputs={name: turn[name] for name in ("reward", "valid", "effective")} | {"info": info}
    )
    span.end(
        outputs={name: turn[name] for name in ("response", "think", "actions", "hit_length_limit")}
    )


def _attached(names: Iterable[str], folder: Path) -> list[Any]:
    from mlflow.tracing.attachments import Attachment

    images = (read_image(folder, name) for name in names)
    return [
        Attachment(content_type="image/png", content_bytes=data)
        for data in images
        if data is not None
    ]
