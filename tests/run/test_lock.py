"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragen_pl.checkpoints.lock import hold
from ragen_pl.config import ConfigError

ROOT = Path(__file__).parents[2]
HOLD = (
    "import sys, pathlib; from ragen_pl.checkpoints.lock import hold; "
    "file = hold(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def other(tmp_path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with process:
        yield process
        process.kill()


def test_a_folder_is_held_by_one_process_and_freed_when_it_is_killed(tmp_path, other):
    with pytest.raises(
        ConfigError, match=rf"paths.run_dir=.*: process {other.pid} on .* trains in it"
    ):
        hold(tmp_path)
    other.kill()
    other.wait()
    with hold(tmp_path):
        pass
    hold(tmp_path).close()


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    hold(tmp_path).close()
    assert "no two runs may use the folder at once" in caplog.text
