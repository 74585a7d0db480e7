"""Artifacts of an evaluation in MLflow."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlflow.tracking import MlflowClient

from ragen_pl.evaluation.mlflow_log import log_evaluation
from ragen_pl.evaluation.report import write_report


def test_other_files_in_its_folder_are_no_artifacts(tmp_path: Path, empty_store: Path) -> None:
    uri = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'mlflow.db')}"
    client = MlflowClient(uri)
    place = (tmp_path / "artifacts").as_uri()
    parent = client.create_run(client.create_experiment("ragen_pl", artifact_location=place))
    about = {"checkpoint": "a", "run": None, "greedy": True, "samples": 1, "seed": 0}
    folder = tmp_path / "here"
    write_report(about | {"truncation": {}}, {}, folder=folder)
    # those of an earlier evaluation, and of somebody who works in this folder
    for name in ("held_out", "far", "private"):
        (folder / name).mkdir()
        (folder / name / "trajectories.jsonl").touch()
    (folder / ".env").write_text("KEY=secret")
    run = {"run_id": parent.info.run_id, "tracking_uri": uri, "signature": ""}
    log_evaluation({"held_out": {"policies": {}}}, cfg={"traces": 2}, folder=folder, run=run)
    (child,) = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    )
    names = {file.path for file in client.list_artifacts(child.info.run_id)}
    assert names == {"evaluation.json", "evaluation.md", "held_out"}
    kept = [file.path for file in client.list_artifacts(child.info.run_id, "held_out")]
    assert kept == ["held_out/trajectories.jsonl"]
