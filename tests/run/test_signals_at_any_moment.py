"""A signal ends a run in one line at any moment, and is no failed start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.runs.module_process import run_module
from support.runs.small_runs import SMALL, run_ranks

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
# moments before there is anything to resume, and those before a start is noted
EARLY = {"reset in check": "SIGTERM", "deletion": "SIGHUP", "start noted": "SIGTERM"}
UNNOTED = ("reset in check", "deletion")
WARM_START = {
    "settings logged": "SIGINT", "constructor 2": "SIGTERM", "reset in demonstrations": "SIGUSR1",
    "setup warm start": "SIGHUP",
}  # fmt: skip
TRAINING = {
    "validation": "SIGINT", "rollout": "SIGHUP", "teardown fit": "SIGUSR1", "last validation": "SIGTERM",
    "reset in baselines": "SIGINT", "logger closed": "SIGHUP",
}  # fmt: skip
# the others take most of the time
QUICK = (*EARLY, *WARM_START, "rollout")
MOMENTS = [
    pytest.param(moment, number, marks=() if moment in QUICK else pytest.mark.slow)
    for moment, number in (EARLY | WARM_START | TRAINING).items()
]
# as little as there is of each phase
SMALLEST = (
    *SMALL, "env.max_turns=1", "rollout.max_response_tokens=4", "rollout.groups=2", "update.epochs=1",
    "update.minibatches=1", "warm_start.steps=1", "warm_start.episodes=2", "validation.episodes=2",
    "validation.baselines.optimal=null", "validation.baselines.cycle=null", "trainer.max_epochs=1",
    "trainer.check_val_every_n_epoch=5", "callbacks.diagnostics=null",
    "callbacks.collapse=null",
)  # fmt: skip
# sends a signal when a module is imported, and another one when the interpreter ends
_SITE = """
import atexit, os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["SIGNAL_AT"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.Signals[os.environ["SIGNAL"]])

sys.meta_path.insert(0, Finder())
atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
"""


def line_of(output: str, *, number: str) -> str:
    """Return the line about a signal, the only one of the run's end."""
    assert "Traceback" not in output and "ignored in" not in output, output
    (line,) = [line for line in output.splitlines() if line.startswith("ragen_pl: ")]
    name = "Ctrl-C" if number == "SIGINT" else number
    assert line.startswith(f"ragen_pl: stopped by {name}; "), output
    return line


@pytest.mark.parametrize(
    ("module", "number"), [("hydra", number) for number in SIGNALS] + [("torch", "SIGTERM")]
)
def test_a_signal_in_an_import_and_at_the_exit(tmp_path: Path, module: str, number: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SITE)
    paths = os.pathsep.join(
        map(str, (tmp_path, ROOT, *filter(None, [os.environ.get("PYTHONPATH")])))
    )
    done = subprocess.run(
        [sys.executable, "-m", "ragen_pl.fit", *SMALL, f"paths.run_dir={tmp_path}/run"],
        env=os.environ | {"PYTHONPATH": paths, "SIGNAL_AT": module, "SIGNAL": number},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        preexec_fn=default_handlers,
    )
    assert done.returncode == (130 if number == "SIGINT" else 143), done.stderr
    assert line_of(done.stdout + done.stderr, number=number).endswith("no run was under way")


def default_handlers() -> None:
    """Undo what a shell or nohup has this process ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def test_a_run_under_nohup_ignores_the_end_of_its_terminal(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SITE)
    done = subprocess.run(
        [sys.executable, "-m", "ragen_pl.fit", "env=nothing"],
        env=os.environ
        | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "SIGNAL_AT": "hydra", "SIGNAL": "SIGHUP"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_IGN),
    )
    assert done.returncode == 2 and "stopped" not in done.stderr, done.stderr


# closes something slowly, which a second signal would leave half closed; or fails to close it
_CLOSING = """
import os, signal, sys, threading, time
from ragen_pl.base.stop_signals import Stopped, stop_behind, stopped_by_signals

def send(*pauses):
    for pause in pauses:
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGTERM)

def closed():
    for _ in range(8):
        time.sleep(0.01)
    print("closed", flush=True)

with stopped_by_signals(for_good=True):
    if sys.argv[1] == "twice":
        threading.Thread(target=send, args=(0.05, 0.02, 0.02), daemon=True).start()
        try:
            time.sleep(60)
        finally:
            closed()
    elif sys.argv[1] == "dropped":
        threading.Thread(target=send, args=(0.05, 0.05), daemon=True).start()
        try:
            time.sleep(60)
        except Stopped:
            time.sleep(60)
    else:
        threading.Thread(target=send, args=(0.05,), daemon=True).start()
        try:
            try:
                time.sleep(60)
            finally:
                threading.Lock().release()
        except Exception as error:
            raise stop_behind(error)
"""


@pytest.mark.parametrize("how", ["twice", "dropped", "failed"])
def test_a_second_signal_leaves_time_to_close(tmp_path: Path, how: str) -> None:
    """Also where the first one was dropped, the process ends; an error of closing is not how it ended."""
    script = tmp_path / "closing.py"
    script.write_text(_CLOSING)
    done = subprocess.run(
        [sys.executable, script, how],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.stderr == "ragen_pl: stopped by SIGTERM; no run was under way\n"
    assert done.returncode == 143
    assert done.stdout == ("closed\n" if how == "twice" else "")


@pytest.mark.parametrize(("moment", "number"), MOMENTS)
def test_a_signal_at_any_moment_of_a_run(tmp_path: Path, moment: str, number: str) -> None:
    run = tmp_path / "run"
    environment = {"SIGNAL_AT": moment, "SIGNAL": number}
    code, output = run_module(
        "ragen_pl.fit",
        [
            *SMALLEST, f"warm_start.enabled={moment not in TRAINING}", "logger=csv",
            "env.target=support.runs.signalling.Lake", "logger._target_=support.runs.signalling.Logger",
            "+callbacks.moments._target_=support.runs.signalling.Moments",
            f"paths.run_dir={run}",
        ],
        folder=tmp_path,
        paths=(TESTS, ROOT),
        environment=environment,
        timeout=1200,
    )  # fmt: skip
    assert code == (130 if number == "SIGINT" else 143), output
    line = line_of(output, number=number)
    starts = run / "starts.jsonl"
    assert starts.exists() == (moment not in UNNOTED)
    if starts.exists():
        first, last = map(json.loads, starts.read_text().splitlines())
        assert "begins" in first and last["ended"] == "stopped"
    if moment in EARLY:
        assert line.endswith("no run was under way")
    else:
        assert f"paths.run_dir={run}" in line
    assert (run / "checkpoints" / "last.ckpt").exists() == (moment in TRAINING)


@pytest.mark.slow
def test_a_signal_to_one_of_two_ranks_outside_of_training_ends_both(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = run_ranks(
        tmp_path,
        [
            *SMALLEST, "warm_start.enabled=false", "validation.baselines.random=null", "trainer.devices=2",
            "trainer.strategy=ddp", "trainer.max_epochs=0", f"paths.run_dir={run}",
            "+callbacks.kill._target_=support.runs.killing.KillAt", "+callbacks.kill.moment=alone",
            "+callbacks.kill.rank=1", "+callbacks.kill.signal_name=SIGTERM",
        ],
    )  # fmt: skip
    assert [one.code for one in ended] == [143, 143], ended
    assert all("Traceback" not in one.output for one in ended), ended
    assert "stopped by SIGTERM" in "".join(one.line for one in ended)
    assert json.loads((run / "starts.jsonl").read_text().splitlines()[-1])["ended"] == "stopped"
