"""Whole runs of agent programs: killed in the midst of episodes and resumed, and on two ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.runs.small_runs import LIMIT_S, SMALL
from support.servers.program_client import CLIENT

# episodes of one to three calls; each has a child in a session of its own, which would outlive it
PROGRAM = """
from chat import *
CHILD = "import os, signal; os.setsid(); print(flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-S", "-c", CHILD], stdout=subprocess.PIPE)
child.stdout.readline()
note = os.path.join(os.environ["NOTES"], str(os.getpid()))
words = ""
messages = []
for turn in range(1 + SEED % 3):
    if turn:
        with open(note, "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
    messages.append({"role": "user", "content": f"turn {turn} of {SEED % 7}"})
    messages.append(ask(messages)["choices"][0]["message"])
    words += messages[-1]["content"] or ""
report(reward=words.count("e") / 8, success="e" in words)
if os.path.exists(note):
    os.remove(note)
"""


def overrides(folder: Path, notes: Path) -> tuple[str, ...]:
    """Return the settings of a run of programs. Each has a note from its second call to its end.

    Args:
        folder: gets the program.
        notes: folder of the notes.
    """
    (folder / "chat.py").write_text(CLIENT)
    (folder / "program.py").write_text(PROGRAM)
    notes.mkdir()
    small = (setting for setting in SMALL if not setting.startswith(("env", "warm_start")))
    return (
        *small,
        "env=program",
        f"env.command=[{sys.executable},-S,{folder / 'program.py'}]",
        f"+env.kwargs.variables.NOTES={notes}",
        "rollout.group_size=2",
        "rollout.max_response_tokens=12",
        "validation.episodes=4",
        "callbacks.checkpoint.every_n_epochs=1",
        "+callbacks.record._target_=support.runs.killing.Record",
    )


def remaining(processes: Sequence[int]) -> list[int]:
    """Wait until processes have ended; return and kill those that run on."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if not any(Path(f"/proc/{number}").exists() for number in processes):
            return []
        time.sleep(0.01)
    left = [number for number in processes if Path(f"/proc/{number}").exists()]
    for number in left:
        os.kill(number, signal.SIGKILL)
    return left


@pytest.mark.slow
def test_a_run_killed_in_the_midst_of_its_programs_ends_bit_identical(job, tmp_path):
    reference, killed = job(), job()
    settings = overrides(tmp_path, tmp_path / "notes")
    records = {name: tmp_path / name for name in ("whole", "resumed")}
    for folder in records.values():
        folder.mkdir()
    run = {name: (*settings, f"+callbacks.record.folder={path}") for name, path in records.items()}
    reference.run(*run["whole"], settings=())
    assert not list((tmp_path / "notes").iterdir())
    # those of one call have ended, the others wait for their second response
    killed.kill_at("rollout-1-2", *run["resumed"], settings=())
    notes = list((tmp_path / "notes").iterdir())
    whole = json.loads((records["whole"] / "rank_0.json").read_text())["responses"]
    again = {key: ids for key, ids in whole.items() if not key.startswith("0 ")}
    interrupted = [ids for key, ids in again.items() if key.startswith("1 ") and len(ids) > 1]
    assert len(notes) == len(interrupted) > 1
    processes = [int(number) for note in notes for number in note.read_text().split()]
    assert len(processes) == 2 * len(notes)
    assert remaining(processes) == []
    killed.run(*run["resumed"], "ckpt_path=last", settings=())
    assert killed.differs_from(reference) == []
    resumed = json.loads((records["resumed"] / "rank_0.json").read_text())
    assert resumed["responses"] == again


@pytest.mark.slow
def test_programs_of_two_ranks_and_few_workers_are_those_of_one_rank(job, tmp_path):
    """With an engine that answers all requests together, and one that answers them one at a time, the latest first."""
    settings = (*overrides(tmp_path, tmp_path / "notes"), "trainer.max_epochs=1")

    def play(name: str, *more: str) -> list[dict[str, list[list[int]]]]:
        folder = tmp_path / name
        folder.mkdir()
        place = f"+callbacks.record.folder={folder}"
        job().run(*settings, place, *more, settings=(), launched=False)
        files = sorted(folder.glob("rank_*.json"))
        return [json.loads(file.read_text())["responses"] for file in files]

    (single,) = play("single")
    two = ("trainer.devices=2", "trainer.strategy=ddp", "env.workers=3", "rollout.num_envs=5")
    continuous = "rollout.engine._target_=support.models.one_at_a_time.OneAtATime"
    assert play("continuous", continuous) == [single]
    for name, more in (("two", ()), ("two_continuous", (continuous,))):
        first, second = play(name, *two, *more)
        assert first.keys().isdisjoint(second) and len(first | second) == 16
        assert first | second == single
