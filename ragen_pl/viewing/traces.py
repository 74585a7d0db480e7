"""Episodes as MLflow traces: agent, its turns, the environment's steps, with the images attached.

MLflow exports them in threads of its own, so that a run does not wait; `flush_traces` does, once, at the end.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_SOURCE_RUN = "mlflow.sourceRun"  # the metadata by which MLflow shows a trace under its run


def trace_records(
    records: Iterable[Mapping[str, Any]],
    *,
    images: Path,
    uri: str,
    experiment_id: str,
    run_id: str,
) -> int:
    """Log a trace for each record under a run, and return how many.

    Args:
        records: of `ragen_pl.viewing.records`.
        images: folder that the records' image paths start from.
        uri: the tracking store.
        experiment_id: of the run.
        run_id: of the MLflow run.
    """
    import mlflow

    logging.getLogger("mlflow.tracing.export.async_export_queue").setLevel(logging.WARNING)
    said = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(uri)  # spans know no client; this is where they go
    if (
        said is None
    ):  # what it sets would be taken for the user's word by another run of this process
        os.environ.pop("MLFLOW_TRACKING_URI", None)
    else:
        os.environ["MLFLOW_TRACKING_URI"] = said
    count = 0
    for record in records:
        _trace(record, images=images, experiment_id=experiment_id, run_id=run_id)
        count += 1
    return count


def flush_traces() -> None:
    """Wait until the traces that were logged so far are stored."""
    import mlflow

    mlflow.flush_trace_async_logging()


def _trace(record: Mapping[str, Any], *, images: Path, experiment_id: str, run_id: str) -> None:
    import mlflow
    from mlflow.entities import SpanType

    where = (
        f"iteration {record['iteration']}"
        if record["validation_set"] is None
        else f"validation set {record['validation set']}"
    )
    root = mlflow.start_span_no_context(
        f"{record['player']}, {where}",
        span_type=SpanType.AGENT,
        inputs={name: record[name] for name in ("seed", "group", "member", "difficulty")},
        tags={
            name: str(record[name])
            for name in (
                "iteration",
                "validation_set",
                "policy",
                "group",
                "member",
                "success",
                "status",
            )
            if record[name] is not None
        },
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
    outcome = {name: turn[name] for name in ("reward", "valid", "effective")}
    step.end(outputs=outcome | {"info": {name: str(one) for name, one in turn["info"].items()}})
    span.end(
        outputs={name: turn[name] for name in ("response", "think", "actions", "hit_length_limit")}
    )


def _attached(names: Iterable[str], folder: Path) -> list[Any]:
    from mlflow.tracing.attachments import Attachment

    return [Attachment.from_file(folder / name, "image/png") for name in names]
