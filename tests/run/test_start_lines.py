"""The lines by which a run can be watched, at its start."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

import pytest
from lightning.pytorch.loggers import MLFlowLogger

from ragen_pl.run.folder import Run
from ragen_pl.run.reports import report_views


def test_start_names_the_live_view_and_mlflow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, uri = Run(tmp_path / "a run"), f"sqlite:///{tmp_path}/mlflow.db"
    with caplog.at_level(logging.INFO):
        report_views(run, MLFlowLogger(tracking_uri=uri))
        report_views(run, False)
    view, mlflow, again = caplog.messages
    assert view == again and view.startswith("watch it: python -m ragen_pl.watch ")
    assert shlex.split(view)[-1] == f"run={run.folder}"
    assert mlflow == f"MLflow: mlflow ui --backend-store-uri {uri}"
