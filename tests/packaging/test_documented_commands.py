"""Every command of the README and of docs/ works as written, in a folder that is not the checkout.

A block under `<!-- not run: reason -->` is left out: set-up, servers, other hardware. Python and YAML blocks whose
first line is a comment with a file's name are written to that file. CHECKOUT stands for the checkout's folder.
Training is cut to a few steps by overrides added behind the command's own. The runs that pages start from have all that
a run has by default; the others have no tracking store, plots, episodes and scripted policies.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.runs.documents import PAGES, ROOT, blocks, commands, has_value, write_files
from support.runs.module_process import run_module

from ragen_pl.checkpoints.lock import one_at_a_time
from ragen_pl.config.composition import compose_accepted

LIMIT_S = 3600
# Pages whose commands train for minutes.
LONG = ("adaptive", "world_model")
REASONS = ("set-up", "server", "other hardware", "asks for keys")
# the shell then prints what it would give to the interpreter
WORDS = """python() { printf '%s\\0' "$PYTHONPATH" "$@"; }; """
SMALL = {
    "fit": {
        "trainer.max_epochs": "1",
        "trainer.check_val_every_n_epoch": "1",
        "warm_start.steps": "2",
        "warm_start.episodes": "16",
        "warm_start.batch_size": "8",
        "validation.episodes": "4",
        "rollout.groups": "4",
        "update.epochs": "1",
    },
    "evaluate": {"validation.episodes": "4"},
    "own_conversations": {"--epochs": "2"},
    "own_module": {"--iterations": "1"},
    "advantages_only": {"--updates": "2"},
}
WITHOUT = {
    "fit": {
        "logger": "none",
        "callbacks.plots": "null",
        "callbacks.trajectories": "null",
        "validation.baselines": "null",
        "validation.blank": "false",
    },
}


def smaller(command: str, *, whole: bool = False) -> str:
    """Return a command with settings added that it does not set itself, and with fewer episodes than thousands.

    Args:
        command: of a page.
        whole: whether it keeps all that a run has by default.
    """
    match = re.search(r"-m ragen_pl\.(\w+)|\bragen-(\w+)|examples/(\w+)\.py", command)
    if match is None or re.search(r"--(help|cfg|json)\b", command):
        return command
    name = match[1] or match[2] or match[3]
    # of measurements
    command = re.sub(r"(?<=validation\.episodes=)\d{4,}", "64", command)
    sizes = SMALL.get(name, {}) | ({} if whole else WITHOUT.get(name, {}))
    added = [f"{name}={value}" for name, value in sizes.items() if f"{name}=" not in command]
    head, *comment = command.split("  #", 1)
    return " ".join([head, *added]) + "".join(f"  #{part}" for part in comment)


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Return the environment of a shell in which `python` is this interpreter."""
    scripts = str(Path(sys.executable).parent)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    return kept | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """Return a folder in which the main job and its text twin have been run, briefly, by one of the test processes."""
    base = tmp_path_factory.getbasetemp()
    # of a test process, inside that of all
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "trained"
    done = folder.with_suffix(".done")
    with one_at_a_time(folder.with_suffix(".lock")):
        if not done.exists():
            # of a process that has failed
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for env in ("frozenlake", "frozenlake_visual"):
                run(smaller(f"python -m ragen_pl.fit env={env}", whole=True), folder, environment)
            done.touch()
    return folder


def run(command: str, folder: Path, environment: dict[str, str]) -> None:
    """Run a command as a shell does and show its last lines where it fails."""
    command = command.replace("CHECKOUT", str(ROOT))
    # one process, of a module or a script
    is_python = re.match(r"(PYTHONPATH=\S+ )?python (-m \w|[\w./-]+\.py\b)", command)
    started = is_python and not re.search(r"[|<>;&`]", re.sub(r"\$\(.*?\)", "", command))
    done = subprocess.run(
        ["bash", "-c", f"{WORDS if started else ''}{command}"], cwd=folder, env=environment,
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=LIMIT_S,
    )  # fmt: skip
    code, output = done.returncode, done.stdout + done.stderr
    if started:
        paths, first, *others = done.stdout.split("\0")[:-1]
        name, *arguments = others if first == "-m" else (first, *others)
        code, output = run_module(
            name, arguments, folder=folder, timeout=LIMIT_S,
            paths=[Path(path) for path in paths.split(os.pathsep) if path], environment={"PYTHONPATH": paths},
        )  # fmt: skip
    assert code == 0, f"{command}\nended with {code}:\n{output[-3000:]}"


def check_run(command: str, folder: Path) -> None:
    """Check that a training command has had its effect: its settings, warm start and metrics are in the folder."""
    match = re.search(r"-m ragen_pl\.fit (?!.*--(?:cfg|help|multirun)\b|-m )(.*)", command)
    if match is None:
        return
    configs = sorted(folder.glob("runs/*/*/config.yaml"), key=lambda file: file.stat().st_mtime_ns)
    configs += [
        file
        for file in folder.glob("runs/*/config.yaml")
        if file.stat().st_mtime_ns > configs[-1].stat().st_mtime_ns
    ]
    cfg, run = OmegaConf.load(configs[-1]), configs[-1].parent
    for line in shlex.split(match[1].replace("CHECKOUT", str(ROOT)), comments=True):
        assert line.startswith("-") or "=" not in line or has_value(cfg, line), (
            f"{line}: not in {run}"
        )
    assert (run / "warm_start.pt").exists() == cfg.warm_start.enabled
    assert (run / "metrics.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.soak] if page.stem in LONG else [])
        for page in PAGES
        if any(block.language == "bash" and not block.reason for block in blocks(page))
    ],
)
def test_documented_commands_succeed(
    page: Path, trained: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    shutil.copytree(trained, folder)
    for block in blocks(page):
        write_files(block, folder)
        if block.language == "bash" and block.reason is None:
            for command in commands(block.body):
                run(smaller(command), folder, environment)
                check_run(command, folder)


def test_only_marked_commands_are_skipped() -> None:
    reasons = [
        (page.name, block.reason) for page in PAGES for block in blocks(page) if block.reason
    ]
    assert [reason for reason in reasons if not reason[1].startswith(REASONS)] == []


SKIPPED = [
    command
    for page in PAGES
    for block in blocks(page)
    if block.reason
    for command in commands(block.body)
    if "-m ragen_pl.fit " in command and "--config-dir" not in command
]


@pytest.mark.parametrize("command", SKIPPED)
def test_overrides_of_skipped_commands_compose(command: str) -> None:
    overrides = shlex.split(command.partition("-m ragen_pl.fit ")[2], comments=True)
    compose_accepted("fit", [word for word in overrides if "=" in word])
