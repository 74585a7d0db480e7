"""Folders, files and stores of a run, refused in one line."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import sys

import pytest

from ragen_pl.base.foreign_files import ForeignFileError
from ragen_pl.config import ConfigError
from ragen_pl.config.ending import ending_of

OF_THE_USERS_FILES = [
    ("env/mine.yaml", "env: [1, 2", r"mine.yaml, line 1: not YAML \(.*\); correct the line"),
    ("env/mine.yaml", "# @package _global_\nenv: {name: a\n  b: c}\n", "mine.yaml, line 3: not YAML"),
    ("env/mine.yaml", "# @package _global_\ndefaults: [custm]\n", "custm"),
    ("env/mine.yaml", "# @package _global_\ndefaults: [custom]\nenv: {max_turn: 3}\n",
     "unknown key env.max_turn; did you mean env.max_turns?"),
    ("env/mine.yaml", "# @package _global_\ndefaults: [custom]\nenv: {max_turns: soon}\n",
     "env.max_turns=soon: expected a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "message"), OF_THE_USERS_FILES)
def test_a_wrong_file_of_the_users_is_refused(fit, tmp_path, name, text, message):
    file = tmp_path / "conf" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    line = fit(
        "--config-dir", "conf", "env=mine", "+env.target=broken_environments.Sound"
    ).refused()
    assert re.search(message, line)


def test_a_folder_that_holds_a_run_is_not_written_over(fit, tiny, tmp_path):
    overrides = (*tiny, "paths.run_dir=mine")
    config = tmp_path / "mine" / "config.yaml"
    config.parent.mkdir()
    config.write_text("seed: 1\n")  # as a run that was refused leaves it
    assert fit(*overrides, "seed=3").code == 0
    assert "seed: 3" in config.read_text()
    message = fit(*overrides, "seed=4").refused()
    assert message == (
        "paths.run_dir=mine: holds a run already; continue it by ckpt_path=last, or set another folder"
    )
    assert "seed: 3" in config.read_text()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_NTASKS"])
def test_processes_started_from_outside_must_agree_on_a_folder(fit, monkeypatch, name):
    monkeypatch.setenv(name, "4")
    message = fit("env=frozenlake").refused()
    assert message.startswith("paths.run_dir=null: 4 processes")
    assert message.endswith("set paths.run_dir to a folder that all of them share")


def test_a_folder_in_the_way_is_refused(fit, tmp_path):
    (tmp_path / "file").touch()
    line = fit("env=frozenlake", "paths.root=file/runs").refused()
    assert "cannot be made" in line and "is a file; set paths.root" in line
    assert "is a file" in fit("env=frozenlake", "paths.run_dir=file").refused()


def test_a_folder_without_rights_is_refused(fit, tmp_path, monkeypatch):
    """Root may write anywhere, so that the system's answer is given here."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    line = fit("env=frozenlake", f"paths.root={tmp_path}").refused()
    assert "may not be written to; set paths.root" in line


def test_a_full_disk_is_refused(fit, monkeypatch):
    full = shutil.disk_usage(".")._replace(free=5 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert "5 MB are left on its disk, a run needs 200 MB" in fit("env=frozenlake").refused()


def test_a_disk_that_fills_during_the_run_is_reported(fit, monkeypatch):
    import torch

    def save(*arguments: object) -> None:
        raise OSError(28, os.strerror(28), "warm_start.partial")

    monkeypatch.setattr(torch, "save", save)
    line = fit("env=frozenlake", "paths.run_dir=full").refused()
    assert "full/warm_start.pt: No space left on device (" in line
    assert "MB are left on the disk of this folder); make room" in line


def test_an_unexpected_error_ends_with_what_to_do(fit, tmp_path):
    failing = "+callbacks.fail._target_=broken_callbacks.Fails"
    settings = ("env=frozenlake", "paths.run_dir=run", "validation.baselines=null")
    result = fit(*settings, failing, "warm_start=none")
    assert result.code == 1
    assert result.stderr.count("Traceback") == 1 and "HYDRA_FULL_ERROR" not in result.stderr
    *_, line = result.stderr.splitlines()
    text = "StrRaises: (no text: its __str__ raised ValueError)"
    assert line.startswith(f"ragen_pl: {text}; nothing was saved, no checkpoint")
    assert "; resume with: python -m ragen_pl.fit " in line and line.endswith(" ckpt_path=last")


def test_a_run_under_way_is_left_alone(fit, tmp_path, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    # as if another process held the lock
    monkeypatch.setattr(fcntl, "lockf", refuse)
    line = fit("env=frozenlake", "paths.run_dir=run").refused()
    assert line.endswith("trains in it; wait for its end, or set another folder")
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_link_in_place_of_the_record_is_refused(fit, tiny, tmp_path):
    """It is no failed start: whoever starts the run again and again comes no further."""
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "elsewhere").touch()
    (run / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    line = fit(*tiny, "paths.run_dir=run").refused()
    assert line == (
        f"{run}/metrics.jsonl is a link or no plain file; put a plain file in its place, or move it away"
    )
    first, last = map(json.loads, (run / "starts.jsonl").read_text().splitlines())
    assert "begins" in first and last["ended"] == "stopped"


def test_a_file_that_is_not_read_ends_a_command_in_one_line():
    ending = ending_of(ForeignFileError("calls.jsonl is a link"))
    assert ending.expected and ending.line.startswith("calls.jsonl is a link; put a plain file")


@pytest.mark.slow
def test_a_store_of_no_known_kind_is_refused(fit):
    line = fit("logger=mlflow", "+logger.uri=ftp://x").refused()
    assert "MLflow at ftp://x refused: " in line and line.endswith("or set logger=none")


@pytest.mark.slow
def test_a_damaged_store_is_refused(fit, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mlflow.db").write_bytes(b"no database at all" * 100)
    line = fit("env=frozenlake", "logger=mlflow").refused()
    assert line.startswith("logger: ") and "not a database" in line


def test_values_are_refused_before_heavy_imports(fit, monkeypatch):
    for name in [module for module in sys.modules if module.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would raise
    assert fit("env=custom", "env.target=broken_environments.FourTuple").refused()
    assert fit("trainer.max_epochs=many").refused()


def test_a_traceback_is_shown_on_request(fit):
    with pytest.raises(ConfigError, match="step returned"):  # Hydra lets it through to Python
        fit("env=custom", "env.target=broken_environments.FourTuple", "debug=true")
