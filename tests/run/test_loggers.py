"""MLflow and CSV loggers: one run however often it is resumed, one point for each step."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from mlflow.tracking import MlflowClient
from sqlalchemy import event
from sqlalchemy.engine import Engine
from support.runs.module_process import start_module
from torch.utils.data import DataLoader

from ragen_pl.config import ConfigError
from ragen_pl.metrics.record import MetricsRecord
from ragen_pl.tracking.loggers import RunCSVLogger, RunLogger
from ragen_pl.tracking.mlflow_outbox import client_of_new_store
from ragen_pl.tracking.mlflow_run import check_reachable, tracking_uri, version_tags

pytestmark = pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable.*")


class Model(pl.LightningModule):
    def __init__(self, *, stop_at: int = -1, error: type[BaseException] = RuntimeError) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.stop_at, self.error = stop_at, error

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if self.global_step == self.stop_at:
            raise self.error("stopped")
        loss = self.layer(batch).square().mean()
        self.log("update/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, module: Model, logger: object, *, steps: int, resume: bool = False) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            pl.callbacks.ModelCheckpoint(
                dirpath=folder / "checkpoints", save_last=True, every_n_train_steps=2
            )
        ],
    )
    path = folder / "checkpoints" / "last.ckpt" if resume else None
    trainer.fit(module, DataLoader(torch.ones(20, 1), batch_size=2), ckpt_path=path)


CONFIG = {"paths": {"root": "?"}, "trainer": {"max_epochs": 3}, "text": "a" * 400}


def settings(tmp_path: Path, **changes: object) -> dict[str, object]:
    return {**CONFIG, "paths": {"root": str(tmp_path)}, **changes}


@pytest.fixture
def run(tmp_path: Path, empty_store: Path) -> Path:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return tmp_path / "frozenlake" / "first"


def stored(run: Path) -> tuple[MlflowClient, str]:
    ids = json.loads((run / "mlflow_run.json").read_text())
    return MlflowClient(ids["tracking_uri"]), ids["run_id"]


def sent(logger: RunLogger) -> bool:
    """Wait until MLflow has all that was logged; return whether it has."""
    return logger._outbox.flush(limit_s=120)


def test_a_resumed_run_continues_its_mlflow_run_without_repeating_points(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="stopped"):
        fit(
            run, Model(stop_at=5), RunLogger(run_dir=str(run), settings=settings(tmp_path)), steps=8
        )
    client, run_id = stored(run)
    assert (tmp_path / "mlflow.db").exists()
    assert client.get_run(run_id).info.status == "FAILED"
    assert [p.step for p in client.get_metric_history(run_id, "update/loss")] == [0, 1, 2, 3, 4]

    changed = settings(tmp_path, trainer={"max_epochs": 9})
    logger = RunLogger(run_dir=str(run), settings=changed)
    assert logger.run_id == run_id and sent(logger)
    assert client.get_run(run_id).info.status == "RUNNING"
    fit(run, Model(), logger, steps=8, resume=True)
    data = client.get_run(run_id)
    steps = Counter(p.step for p in client.get_metric_history(run_id, "update/loss"))
    assert steps == dict.fromkeys(range(8), 1)
    assert data.info.status == "FINISHED"
    assert data.data.params["trainer.max_epochs"] == "3"
    assert data.data.tags["resumed.trainer.max_epochs"] == "9"
    assert data.data.params["text"] == "a" * 249 + "…"
    assert data.data.tags["checkpoint"] == str(run / "checkpoints" / "last.ckpt")
    assert data.data.tags["version.lightning"].startswith("2.6")
    names = {file.path for file in client.list_artifacts(run_id)}
    assert names == {"config.yaml", "config_resumed.yaml"}
    assert len(client.search_runs([data.info.experiment_id])) == 1


def test_two_fits_of_one_run_end_as_finished(tmp_path: Path, run: Path) -> None:
    logger = RunLogger(run_dir=str(run), settings=settings(tmp_path))
    fit(run, Model(), logger, steps=2)
    client, run_id = stored(run)
    assert client.get_run(run_id).info.status == "FINISHED"
    logger.log_graph(None)
    assert sent(logger)
    assert client.get_run(run_id).info.status == "RUNNING"
    logger.finalize("success")
    logger.log_metrics({"val/success": 0.5}, 3)
    assert sent(logger)
    assert client.get_run(run_id).info.status == "FINISHED"
    assert client.get_run(run_id).data.metrics["val/success"] == 0.5


def test_an_experiment_opens_on_its_runs_unless_somebody_chose_another_view(
    tmp_path: Path, run: Path
) -> None:
    RunLogger(run_dir=str(run), settings=settings(tmp_path))
    client, run_id = stored(run)
    number = client.get_run(run_id).info.experiment_id
    view = "mlflow.experimentKind"
    assert client.get_experiment(number).tags[view] == "custom_model_development"
    client.set_experiment_tag(number, view, "genai_development")
    RunLogger(run_dir=str(run), settings=settings(tmp_path))
    assert client.get_experiment(number).tags[view] == "genai_development"


def test_a_run_stopped_by_a_signal_has_status_killed(tmp_path: Path, run: Path) -> None:
    logger = RunLogger(run_dir=str(run), settings=settings(tmp_path))
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(run, Model(stop_at=1, error=KeyboardInterrupt), logger, steps=4)
    client, run_id = stored(run)
    assert client.get_run(run_id).info.status == "KILLED"


def test_the_tracking_uri_of_the_environment_is_used(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tracking_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    uri = f"sqlite:///{tmp_path}/elsewhere.db"
    shutil.copy(tmp_path / "mlflow.db", tmp_path / "elsewhere.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert tracking_uri(tmp_path) == uri
    RunLogger(run_dir=str(run), settings=settings(tmp_path))
    assert json.loads((run / "mlflow_run.json").read_text())["tracking_uri"] == uri
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    # a resumed run keeps its store
    first = stored(run)[1]
    assert RunLogger(run_dir=str(run)).run_id == first


def test_a_sqlite_file_may_be_named_by_a_relative_path(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    monkeypatch.chdir(tmp_path)
    logger = RunLogger(run_dir=str(run), settings=settings(tmp_path / "elsewhere"))
    logger.log_metrics({"update/loss": 0.5}, 1)
    logger.close()
    monkeypatch.chdir("/")
    client, run_id = stored(run)
    assert client.get_run(run_id).data.metrics == {"update/loss": 0.5}
    assert RunLogger(run_dir=str(run), settings=settings(tmp_path)).run_id == run_id


def test_only_the_tables_of_a_new_store_are_not_waited_for(tmp_path: Path) -> None:
    modes: dict[str, set[int]] = {}

    def note(connection: object, cursor: sqlite3.Cursor, statement: str, *_: object) -> None:
        (mode,) = cursor.connection.execute("PRAGMA synchronous").fetchone()
        modes.setdefault(" ".join(statement.split()[:2]), set()).add(mode)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        client = client_of_new_store(f"sqlite:///{tmp_path}/mlflow.db")
        assert modes.pop("CREATE TABLE") == {0}
        modes.clear()
        client.create_experiment("after")
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    # sqlite's number of FULL
    assert modes["INSERT INTO"] == {2}


# waits until the test opens the pipe
OPENING = """
import sys
open(sys.argv[1]).read()
from ragen_pl.tracking.loggers import RunLogger
RunLogger(run_dir=sys.argv[2], root=sys.argv[3])
"""


def test_runs_that_begin_together_share_a_new_store(tmp_path: Path) -> None:
    (tmp_path / "opening.py").write_text(OPENING)
    runs = [tmp_path / f"run{number}" for number in range(3)]
    processes = []
    for run in runs:
        run.mkdir()
        os.mkfifo(run / "pipe")
        arguments = [str(run / "pipe"), str(run), str(tmp_path)]
        output = run / "output.txt"
        processes.append(start_module("opening.py", arguments, folder=tmp_path, output=output))
    # each waits here for the process that reads it
    pipes = [(run / "pipe").open("w") for run in runs]
    for pipe in pipes:
        pipe.close()
    for run, process in zip(runs, processes, strict=True):
        process.join()
        assert process.exitcode == 0, (run / "output.txt").read_text()
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("ragen_pl")
    assert len(client.search_runs([experiment.experiment_id])) == 3


def test_an_unreachable_server_is_reported_in_one_line(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:9 cannot be reached .*logger=none"):
        RunLogger(run_dir=str(run), uri="http://127.0.0.1:9")
    check_reachable("sqlite:////nowhere/needed.db")


def test_version_tags_outside_a_checkout_have_no_git_commit(tmp_path: Path) -> None:
    tags = version_tags(checkout=tmp_path)
    assert "git.commit" not in tags
    assert "version.torch" in tags


def test_a_resumed_run_continues_its_csv_file(run: Path) -> None:
    with pytest.raises(RuntimeError, match="stopped"):
        fit(run, Model(stop_at=5), RunCSVLogger(run_dir=str(run), settings={"a": 1}), steps=8)
    fit(run, Model(), RunCSVLogger(run_dir=str(run), settings={"a": 2}), steps=8, resume=True)
    with (run / "csv" / "metrics.csv").open() as stream:
        assert [row["step"] for row in csv.DictReader(stream)] == [str(step) for step in range(8)]


def test_nan_and_infinity_are_kept(tmp_path: Path, run: Path) -> None:
    logger = RunLogger(run_dir=str(run), settings=settings(tmp_path))
    table = RunCSVLogger(run_dir=str(run))
    for one in (logger, table):
        for step, value in enumerate((0.5, math.nan, math.inf)):
            one.log_metrics({"update/loss": value}, step=step)
        one.finalize("success")
    client, run_id = stored(run)
    points = [point.value for point in client.get_metric_history(run_id, "update/loss")]
    assert points[0] == 0.5 and math.isnan(points[1]) and points[2] > 1e300
    with (run / "csv" / "metrics.csv").open(newline="") as stream:
        values = [float(row["update/loss"]) for row in csv.DictReader(stream)]
    assert values[0] == 0.5 and math.isnan(values[1]) and values[2] == math.inf


def test_a_name_that_mlflow_does_not_take_loses_no_other_value(tmp_path: Path, run: Path) -> None:
    kwargs = {"Preis (€)": 1, "a//b": 2, "size": 3}
    logger = RunLogger(run_dir=str(run), settings=settings(tmp_path, env={"kwargs": kwargs}))
    names = ("metrics/正确率", "metrics/%", "metrics/a//b", "metrics/../c", "return")
    long = f"metrics/{'a' * 400}"
    logger.log_metrics({f"rollout/{name}": 0.5 for name in (*names, long)}, 1)
    logger.close()
    client, run_id = stored(run)
    kept = client.get_run(run_id).data
    taken = {"metrics/正确率", "metrics", "metrics/a/b", "metrics/c", "return", long[:242]}
    assert kept.metrics == {f"rollout/{name}": 0.5 for name in taken}
    assert kept.params["trainer.max_epochs"] == "3"
    given = {name: value for name, value in kept.params.items() if name.startswith("env.kwargs.")}
    assert given == {"env.kwargs.Preis ": "1", "env.kwargs.a/b": "2", "env.kwargs.size": "3"}


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    folder = tmp_path / "run"
    logger = RunLogger(run_dir=str(folder), settings=settings(tmp_path))
    RunCSVLogger(run_dir=str(folder), settings={"a": 1})
    logger.log_metrics({"a": 1.0}, 0)
    logger.log_graph(None)
    logger.finalize("success")
    assert (logger.version, logger.save_dir) == (None, str(folder))
    assert list(tmp_path.iterdir()) == []


def test_points_are_logged_every_few_iterations(run: Path) -> None:
    logger = RunLogger(run_dir=str(run), settings=settings(run.parents[1]), every_n_iterations=4)
    for step in range(1, 10):
        logger.log_metrics({"rollout/success": 0.5, "collapse/events": 0.0}, step)
    logger.log_metrics({"val/success": 0.5, "val_far/success": 0.5}, 7)
    logger.close()
    client, run_id = stored(run)
    steps = {
        name: sorted(point.step for point in client.get_metric_history(run_id, name))
        for name in ("rollout/success", "collapse/events", "val/success", "val_far/success")
    }
    assert steps == {
        "rollout/success": [1, 4, 8],
        "collapse/events": list(range(1, 10)),
        "val/success": [7],
        "val_far/success": [7],
    }


def test_points_of_an_earlier_process_are_known_by_the_iteration(run: Path) -> None:
    """A resumed run keeps one entry of them an iteration."""
    first = MetricsRecord(run)
    for step in range(1, 6):
        first.add({f"rollout/{n}": 0.5 for n in range(30)}, step)
    resumed = MetricsRecord(run)
    assert [len(resumed._ever._at[step]) for step in range(1, 6)] == [1] * 5
