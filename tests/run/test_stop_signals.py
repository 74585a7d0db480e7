"""A run that somebody stops says in one line what it has saved and how it goes on."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = (
    sys.executable, "-m", "ragen_pl.fit", "env=frozenlake", "logger=none", "callbacks.progress=null",
    "callbacks.trajectories=null", "warm_start.steps=2", "warm_start.episodes=4", "rollout.groups=4",
    "validation.episodes=4", "trainer.max_epochs=100000", "callbacks.checkpoint.every_n_epochs=1",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_says_how_it_goes_on(tmp_path: Path, number: int, code: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        [*COMMAND, f"paths.run_dir={tmp_path}"], env=environment, stderr=subprocess.PIPE, text=True,
        # a shell's background job ignores Ctrl-C, and so would all that it starts
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    last = tmp_path / "checkpoints" / "last.ckpt"
    patience = time.monotonic() + 120
    try:
        while not last.exists() and time.monotonic() < patience:
            time.sleep(0.1)
        run.send_signal(number)
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == code, said
    (line,) = [one for one in said.splitlines() if one.startswith("ragen_pl: ")]
    told, _, command = line.partition("; go on with: ")
    assert f"its last checkpoint is {last}" in told
    assert "Traceback" not in said

    more = [one for one in shlex.split(command) if not one.startswith("trainer.max_epochs")]
    more = [sys.executable, *more[1:], "trainer.max_epochs=1", f"paths.run_dir={tmp_path}"]
    assert subprocess.run(more, env=environment, check=False).returncode == 0
