"""A tracking store that is locked, away or deleted concerns neither the training nor what is logged."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from support.servers.browser import record

from ragen_pl.config import ConfigError
from ragen_pl.config.own_files import write_settings
from ragen_pl.tracking import loggers, mlflow_outbox
from ragen_pl.tracking.loggers import RunLogger
from ragen_pl.tracking.mlflow_calls import RunCalls
from ragen_pl.tracking.mlflow_process import MlflowProcess
from ragen_pl.tracking.mlflow_run import check_address
from ragen_pl.tracking.outbox import Outbox, RefusedError, calls_in
from ragen_pl.tracking.unsent import send_unsent

LIMIT_S = 120.0


class Server:
    """Receives calls, or fails as a test wants it."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.away = threading.Event()
        self.asked = threading.Event()
        self.new = False

    def begin(self) -> bool:
        self.asked.set()
        if self.away.is_set():
            raise ConnectionError("nobody there")
        new, self.new = self.new, False
        return new

    def send(self, call: Any) -> None:
        if self.away.is_set():
            raise ConnectionError("nobody there")
        if call["n"] < 0:
            raise RefusedError("a negative number")
        self.got.append(call["n"])


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def outbox(tmp_path, server) -> Iterator[Callable[[], Outbox]]:
    """Return a function that opens the outbox of a folder, as each process of a run does."""
    opened = []

    def make() -> Outbox:
        opened.append(Outbox(tmp_path / "calls", server))
        return opened[-1]

    yield make
    for one in opened:
        if not one._closed:
            one.close(limit_s=LIMIT_S)


def put(box: Outbox, *numbers: int) -> None:
    for number in numbers:
        box.put({"n": number})


def test_calls_are_sent_in_order_and_a_refused_one_is_left_out(outbox, server, caplog):
    box = outbox()
    put(box, 1, 2, -3, 4)
    assert box.flush(limit_s=LIMIT_S) and server.got == [1, 2, 4]
    assert "a call was refused and is left out: a negative number" in caplog.text
    assert box.close(limit_s=LIMIT_S) is None


def test_calls_wait_for_the_server_and_are_sent_once(outbox, server, caplog):
    box = outbox()
    put(box, 1)
    assert box.flush(limit_s=LIMIT_S)
    server.away.set()
    put(box, 2, 3)
    # it does not wait for the server
    assert not box.flush(limit_s=LIMIT_S)
    assert box.close(limit_s=LIMIT_S) == "2 calls are not sent (nobody there)"
    assert caplog.text.count("nobody there; the run goes on and sends its metrics later") == 1
    server.away.clear()
    again = outbox()
    put(again, 4)
    assert again.close(limit_s=LIMIT_S) is None
    assert server.got == [1, 2, 3, 4]


def test_calls_are_sent_when_the_server_is_back(outbox, server, caplog):
    caplog.set_level(logging.INFO)
    server.away.set()
    box = outbox()
    put(box, 1, 2)
    assert server.asked.wait(LIMIT_S) and not box.flush(limit_s=LIMIT_S)
    server.away.clear()
    assert box.close(limit_s=LIMIT_S) is None
    assert server.got == [1, 2]
    assert "the server answers again" in caplog.text


def test_a_line_that_a_killed_process_has_cut_is_dropped(outbox, server, tmp_path):
    box = outbox()
    put(box, 1)
    box.close(limit_s=LIMIT_S)
    with (tmp_path / "calls" / "calls.jsonl").open("a") as file:
        file.write('{"n": 9')
    again = outbox()
    put(again, 2)
    assert again.close(limit_s=LIMIT_S) is None
    assert server.got == [1, 2] == [call["n"] for call in calls_in(tmp_path / "calls")]


def test_a_full_disk_leaves_whole_calls(outbox, server, tmp_path):
    box = outbox()
    put(box, 1)
    size = (tmp_path / "calls" / "calls.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 3, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            put(box, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    put(box, 3)
    assert box.close(limit_s=LIMIT_S) is None
    assert server.got == [1, 3] == [call["n"] for call in calls_in(tmp_path / "calls")]


def test_a_server_that_has_lost_the_run_gets_all_calls_again(outbox, server):
    box = outbox()
    put(box, 1, 2)
    box.close(limit_s=LIMIT_S)
    server.new, server.got = True, []
    again = outbox()
    put(again, 3)
    assert again.close(limit_s=LIMIT_S) is None and server.got == [1, 2, 3]


# ---- MLflow


@pytest.fixture
def run(tmp_path, empty_store, monkeypatch) -> Path:
    monkeypatch.setattr(loggers, "_FLUSH_S", 0.2)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return tmp_path / "frozenlake" / "first"


def logger_of(run: Path) -> RunLogger:
    return RunLogger(run_dir=str(run), settings={"paths": {"root": str(run.parents[1])}})


def points(run: Path, name: str) -> list[tuple[int, float]]:
    ids = json.loads((run / "mlflow_run.json").read_text())
    history = MlflowClient(ids["tracking_uri"]).get_metric_history(ids["run_id"], name)
    return sorted((point.step, point.value) for point in history)


@contextmanager
def locked(store: Path) -> Iterator[None]:
    """Lock a sqlite file as another process may do it."""
    connection = sqlite3.connect(store, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        connection.close()


def test_a_locked_store_keeps_no_call_waiting_and_gets_all_points_later(run, caplog):
    logger = logger_of(run)
    assert logger._outbox.flush(limit_s=LIMIT_S)
    with locked(run.parents[1] / "mlflow.db"):
        for step in range(3):
            logger.log_metrics({"update/loss": step / 2, "epoch": 0.0}, step)
        (run / "plot.png").write_bytes(b"picture")
        logger.log_files(run / "plot.png", place="plots")
        logger.experiment.set_tag(logger.run_id, "alarm", "none")
        logger.finalize("success")
        logger.close()
    assert "6 calls are not sent" in caplog.text
    assert f"python -m ragen_pl.sync run={run}" in caplog.text
    assert points(run, "update/loss") == []
    assert send_unsent(run).endswith(f"has all of {run}")
    assert points(run, "update/loss") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    ids = json.loads((run / "mlflow_run.json").read_text())
    client = MlflowClient(ids["tracking_uri"])
    assert client.get_run(ids["run_id"]).data.tags["alarm"] == "none"
    assert [file.path for file in client.list_artifacts(ids["run_id"], "plots")] == [
        "plots/plot.png"
    ]
    # what a killed process has sent and not noted is sent again, and changes nothing
    (run / "mlflow" / "sent.json").unlink()
    send_unsent(run)
    assert points(run, "update/loss") == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_a_deleted_store_gets_all_points_at_the_next_resume(run, empty_store):
    first = logger_of(run)
    for step in range(3):
        first.log_metrics({"update/loss": step / 2}, step)
    assert first._outbox.close(limit_s=LIMIT_S) is None
    # another store in its place knows nothing of the run
    shutil.copy(empty_store, run.parents[1] / "mlflow.db")
    resumed = logger_of(run)
    # the steps since the checkpoint are repeated
    for step in range(2, 4):
        resumed.log_metrics({"update/loss": step / 2}, step)
    assert resumed._outbox.flush(limit_s=LIMIT_S)
    assert points(run, "update/loss") == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]
    resumed.close()


def test_a_store_that_lets_nobody_delete_gets_the_points_after_it(run, caplog, monkeypatch):
    class Guarded:
        def delete_artifacts(self, place: str) -> None:
            raise PermissionError(f"may not delete {place}")

    monkeypatch.setattr(mlflow_outbox, "get_artifact_repository", lambda uri: Guarded())
    logger = logger_of(run)
    logger.remove_files("trajectories/iteration_0010")
    logger.log_metrics({"update/loss": 0.5}, 1)
    assert logger._outbox.close(limit_s=LIMIT_S) is None
    assert points(run, "update/loss") == [(1, 0.5)]
    assert "may not delete trajectories/iteration_0010" in caplog.text


@pytest.mark.parametrize(
    "line", ["{", '{"schema": 1}', json.dumps(record(0, logprobs=[None] * 4)), json.dumps({"schema": 2})]
)  # fmt: skip
def test_records_that_cannot_be_read_keep_no_call_waiting(run, caplog, line):
    folder = run / "trajectories" / "iteration_0000"
    folder.mkdir(parents=True)
    (folder / "trajectories.jsonl").write_text(f"{line}\n")
    logger = logger_of(run)
    logger.log_traces(folder, count=1)
    logger.log_metrics({"update/loss": 0.5}, 1)
    assert logger._outbox.close(limit_s=LIMIT_S) is None
    assert points(run, "update/loss") == [(1, 0.5)]
    assert "is left out: traces of trajectories/iteration_0000" in caplog.text


def test_a_process_with_mlflow_that_is_killed_is_replaced(run, caplog):
    process = MlflowProcess()
    with pytest.raises(ConfigError, match=r"127.0.0.1:9 cannot be reached"):
        process.start_run(run, experiment="ragen_pl", uri="http://127.0.0.1:9")
    uri = f"sqlite:///{run.parents[1]}/mlflow.db"
    start = process.start_run(run, experiment="ragen_pl", uri=uri)
    outbox = Outbox(run / "mlflow", process.sender(run))
    calls = RunCalls(outbox, folder=run)
    calls.put("start", **start)
    calls.metrics([("update/loss", 0.5, 1, 0)])
    calls.put("file", path="none", place=None)
    assert outbox.flush(limit_s=LIMIT_S) and "none is gone" in caplog.text
    process._process.kill()
    calls.metrics([("update/loss", float("nan"), 1, 1)])
    assert not outbox.flush(limit_s=LIMIT_S) and "process of MLflow has ended" in caplog.text
    calls.status("FINISHED")
    assert outbox.close(limit_s=LIMIT_S) is None
    assert [step for step, _ in points(run, "update/loss")] == [0, 1]
    process.end(limit_s=LIMIT_S)
    assert process._process.returncode == 0


def test_a_process_with_mlflow_ends_with_a_run_that_had_no_use_for_it():
    code = (
        "from ragen_pl.tracking import mlflow_process\n"
        "mlflow_process.start_early()\n"
        "print(mlflow_process._early[0]._process.pid)\n"
        "raise SystemExit(2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_files_outside_the_runs_folder_are_not_sent(run, tmp_path):
    logger = logger_of(run)
    assert logger._outbox.close(limit_s=LIMIT_S) is None
    secret = tmp_path / "secret" / "key"
    secret.parent.mkdir()
    secret.write_text("s3cret")
    (run / "link").symlink_to(secret)
    write_settings(
        run / "config.yaml", "seed: 0\n"
    )  # links of one's own are not refused, only not sent
    calls = [
        {"call": "file", "path": path, "place": None}
        for path in (
            str(secret),
            f"mlflow/files/x/../../../../../{secret.relative_to(tmp_path)}",
            "link",
        )
    ]
    with (run / "mlflow" / "calls.jsonl").open("a") as file:
        file.writelines(json.dumps(call) + "\n" for call in calls)
    send_unsent(run)
    ids = json.loads((run / "mlflow_run.json").read_text())
    artifacts = MlflowClient(ids["tracking_uri"]).list_artifacts(ids["run_id"])
    assert [file.path for file in artifacts] == ["config.yaml"] and secret.exists()


def test_a_run_that_is_not_in_mlflow_cannot_be_sent(tmp_path):
    with pytest.raises(
        ConfigError, match=r"expected the folder of a run in MLflow, with its mlflow_run"
    ):
        send_unsent(tmp_path)


def test_a_run_may_be_in_no_folder_of_runs(tmp_path, monkeypatch):
    """As one that is mounted at `/run`, and named without further folders."""
    (tmp_path / "run").mkdir()
    note = {"run_id": "0" * 32, "tracking_uri": "http://elsewhere"}
    (tmp_path / "run" / "mlflow_run.json").write_text(json.dumps(note))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="nothing shows that this account wrote the file"):
        send_unsent(Path("run"))
    # the key is none of the logger's file
    with pytest.raises(ConfigError, match=r"set \+logger\.uri=… or logger=none"):
        check_address(tmp_path / "run", tmp_path)
