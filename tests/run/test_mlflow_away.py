"""MLflow's server is killed for minutes in the midst of a run: `pytest -m soak tests/run/test_mlflow_away.py`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from soak.soak_services import points_of, unsent
from support.runs.module_process import start_module
from support.runs.small_runs import ROOT, SMALL, TESTS, free_port

from ragen_pl.metrics.record import RecordReader

AWAY_S = 300.0
LIMIT_S = 900.0
STOPPED = 143
METRIC = "rollout/return"


class TrackingServer:
    """`mlflow server` on a store in a folder, which is killed and started again at one address."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port),
            "--workers", "1", "--backend-store-uri", f"sqlite:///{self._folder / 'mlflow.db'}",
            "--artifacts-destination", str(self._folder / "artifacts"),
        ]  # fmt: skip
        with (self._folder / "server.txt").open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True
            )

        def answers() -> bool:
            assert self._process.poll() is None, (self._folder / "server.txt").read_text()
            with suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return True
            return False

        wait_for(answers)

    def kill(self) -> None:
        """Kill it with its workers."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    last = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.5)


@pytest.mark.soak
def test_a_run_goes_on_while_its_server_is_killed_for_five_minutes(tmp_path, empty_store):
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    output = tmp_path / "output.txt"

    def iterations() -> int:
        return len(RecordReader(tmp_path / "run").rows())

    def sent() -> int:
        steps = [step for name, step in points_of(tmp_path / "mlflow.db") if name == METRIC]
        return max(steps, default=-1)

    server = TrackingServer(tmp_path)
    settings = (
        *(one for one in SMALL if one not in ("logger=none", "callbacks.plots=null")),
        "warm_start.enabled=false",
        "trainer.max_epochs=100000",
        "trainer.check_val_every_n_epoch=20",
        "validation.baselines=null",
        "+callbacks.pace._target_=support.runs.killing.Pace",
        "+callbacks.pace.seconds=1",
        f"paths.root={tmp_path}",
        f"paths.run_dir={tmp_path / 'run'}",
    )
    run = start_module(
        "ragen_pl.fit",
        settings,
        folder=tmp_path,
        output=output,
        paths=(TESTS, ROOT),
        environment={"MLFLOW_TRACKING_URI": server.url},
    )
    try:
        wait_for(lambda: sent() >= 3)
        server.kill()
        before, kept = iterations(), sent()
        time.sleep(AWAY_S)
        after = iterations()
        assert run.is_alive(), output.read_text()[-5000:]
        assert after > before and sent() == kept
        server.start()
        wait_for(lambda: sent() >= after)
        run.terminate()
        run.join(LIMIT_S)
    finally:
        server.kill()
        run.kill()
    assert run.exitcode == STOPPED, output.read_text()[-5000:]
    # each point that was logged is there once
    assert not unsent(tmp_path)
