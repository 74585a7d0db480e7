"""A run that is stopped from outside saves, reports how to resume, and ends with the signal's exit code."""

from __future__ import annotations

import os
import shlex
import signal
import time
from pathlib import Path

import pytest
import torch
from support.runs.module_process import run_module, start_module
from support.runs.small_runs import SMALL

SETTINGS = (
    *SMALL,
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
    file = tmp_path / "output.txt"
    arguments = [*SETTINGS, f"paths.run_dir={tmp_path}"]
    run = start_module("ragen_pl.fit", arguments, folder=tmp_path, output=file)
    last = tmp_path / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + 600
    try:
        while not last.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        before = last.stat().st_mtime_ns
        os.kill(run.pid, number)
        run.join(600)
    finally:
        run.kill()
        run.join()
    output = file.read_text()
    assert run.exitcode == code, output
    assert last.stat().st_mtime_ns > before
    (line,) = [line for line in output.splitlines() if line.startswith("ragen_pl: ")]
    message, _, command = line.partition("; resume with: ")
    assert f"the last checkpoint is {last}" in message
    assert "Traceback" not in output

    python, dash_m, module, *overrides = shlex.split(command)
    assert (python, dash_m) == ("python", "-m")
    overrides = [word for word in overrides if not word.startswith("trainer.max_epochs")]
    epochs = torch.load(last, weights_only=True)["epoch"] + 1
    overrides += [f"trainer.max_epochs={epochs}", f"paths.run_dir={tmp_path}"]
    code, output = run_module(module, overrides, folder=tmp_path, timeout=600)
    assert code == 0, output
