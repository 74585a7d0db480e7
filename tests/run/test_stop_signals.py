"""A run that is stopped from outside saves, reports how to resume, and ends with the signal's exit code."""

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
import torch
from module_process import run_module

ROOT = Path(__file__).parents[2]
COMMAND = (
    sys.executable,
    "-m",
    "ragen_pl.fit",
    "env=frozenlake",
    "logger=none",
    "callbacks.progress=null",
    "callbacks.trajectories=null",
    "warm_start.steps=2",
    "warm_start.episodes=4",
    "rollout.groups=4",
    "validation.episodes=4",
    "trainer.max_epochs=100000",
    "callbacks.checkpoint.every_n_epochs=2",
)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_saves_and_prints_the_command_that_resumes_it(
    tmp_path: Path, number: int, code: int
) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        [*COMMAND, f"paths.run_dir={tmp_path}"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background job ignores Ctrl-C, and so does every process that it starts
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    last = tmp_path / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + 600
    try:
        while not last.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        before = last.stat().st_mtime_ns
        run.send_signal(number)
        _, stderr = run.communicate(timeout=600)
    finally:
        run.kill()
    assert run.returncode == code, stderr
    assert last.stat().st_mtime_ns > before
    (line,) = [line for line in stderr.splitlines() if line.startswith("ragen_pl: ")]
    message, _, command = line.partition("; resume with: ")
    assert f"the last checkpoint is {last}" in message
    assert "Traceback" not in stderr

    python, dash_m, module, *overrides = shlex.split(command)
    assert (python, dash_m) == ("python", "-m")
    overrides = [word for word in overrides if not word.startswith("trainer.max_epochs")]
    epochs = torch.load(last, weights_only=True)["epoch"] + 1
    overrides += [f"trainer.max_epochs={epochs}", f"paths.run_dir={tmp_path}"]
    code, output = run_module(module, overrides, folder=tmp_path, timeout=600)
    assert code == 0, output
