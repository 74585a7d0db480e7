"""Lines at the start of a run, each printed once: by which it can be watched, and those of libraries."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning.pytorch.loggers import MLFlowLogger
from support.runs.module_process import ROOT, run_module

from ragen_pl.checkpoints.folder import Run
from ragen_pl.run.reports import report_views

# a run without an iteration, then one that ends before it starts in a program with a log of its own
FROM_PYTHON = """
import logging
import ragen_pl

settings = {
    "env": "frozenlake", "model": "small_lm", "logger": "none", "paths.run_dir": "run", "trainer.max_epochs": 0,
    "warm_start.enabled": False, "validation.episodes": 2, "validation.baselines": None, "env.max_turns": 1,
    "rollout.max_response_tokens": 4, "callbacks.plots": None,
}
ragen_pl.train(**settings)
print("then", flush=True)
logging.basicConfig(level=logging.INFO, format="own log: %(message)s")
ragen_pl.train(**settings | {"callbacks.checkpoint.filename": "/elsewhere"})
"""
# names of loggers with a handler of their own, or below one
LIBRARIES = ("lightning.fabric", "lightning.pytorch", "huggingface_hub.utils")
COMMAND = f"""
import logging
from ragen_pl.config import hydra_main
{{before}}

@hydra_main("watch")
def main(cfg):
    {{inside}}
    for name in {LIBRARIES}:
        logging.getLogger(name).warning("message of %s", name)

main()
"""


def test_start_names_the_live_view_and_mlflow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, uri = Run(tmp_path / "Ein Lauf (1)"), f"sqlite:///{tmp_path}/mlflow.db"
    with caplog.at_level(logging.INFO):
        report_views(run, [MLFlowLogger(tracking_uri=uri)])
        report_views(run, [])
    # a store that is made has lines of its own
    records = [record for record in caplog.records if record.name == "ragen_pl.run.reports"]
    view, mlflow, again = [record.getMessage() for record in records]
    assert view == again and view.startswith("watch it: python -m ragen_pl.watch ")
    parsed = OverridesParser.create().parse_override(shlex.split(view)[-1])
    assert (parsed.key_or_group, parsed.value()) == ("run", str(run.folder))
    assert mlflow == f"MLflow: mlflow ui --backend-store-uri {uri}"


def test_a_run_from_python_prints_its_start_once(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FROM_PYTHON)
    code, output = run_module("program.py", [], folder=tmp_path, timeout=1200)
    first, _, second = output.partition("then\n")
    checking = [line for line in first.splitlines() if line.startswith("checking frozenlake (")]
    assert len(checking) == first.count("checking ") == 1, output
    assert first.count("watch it: python -m ragen_pl.watch run=") == 1, output
    # Lightning's on devices
    assert "GPU available" not in output
    # a log of the program's own is left to it
    assert second.count(checking[0]) == second.count(f"own log: {checking[0]}") == 1, output
    assert code == 1 and "callbacks.checkpoint.filename=/elsewhere: " in second


@pytest.mark.parametrize("place", ["before", "inside"])
def test_a_command_prints_the_messages_of_libraries_once(tmp_path: Path, place: str) -> None:
    """Libraries add their handlers when they are imported: before Hydra adds that of the root, or after it."""
    imported = {place: "import huggingface_hub, lightning.pytorch"}
    program = COMMAND.format(**{"before": "", "inside": ""} | imported)
    (tmp_path / "command.py").write_text(program)
    # in a process that has imported nothing yet
    done = subprocess.run(
        [sys.executable, "command.py", f"run={tmp_path}"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=1200,
    )
    output = done.stdout
    assert done.returncode == 0, output
    assert [output.count(f"message of {name}") for name in LIBRARIES] == [1, 1, 1], output
