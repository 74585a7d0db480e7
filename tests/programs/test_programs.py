"""Agent programs as environments: requests, answers, endings, results and what may not disturb others."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from program_client import CLIENT
from trajectories import responses

from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.trajectory import EpisodeStatus

SPEAK = """
messages = []
for turn in range(3):
    messages.append({"role": "user", "content": f"turn {turn} of {SEED}"})
    messages.append(ask(messages)["choices"][0]["message"])
report(reward=0.5, success=True)
print("done")
"""


def test_a_program_is_an_episode(play, script):
    (episode,) = play(script(SPEAK))
    assert episode.status is EpisodeStatus.TERMINATED and episode.error is None
    assert episode.success and episode.reward == 0.5
    assert [turn.response_text for turn in episode.turns] == ["word 0", "word 1", "word 2"]
    assert [turn.history for turn in episode.turns] == ["first", "joined", "joined"]
    assert episode.turns[1].observation.text == "user: turn 1 of 0"
    assert episode.turns[-1].reward_terms == {"environment/program": 0.5}
    assert episode.turns[-1].info["program"]["output"] == "done\n"
    for before, after in zip(episode.turns, episode.turns[1:], strict=False):
        known = np.concatenate([before.prompt_ids, before.response_ids])
        assert np.array_equal(after.prompt_ids[: len(known)], known)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("report(reward=1.0)", "ended without a request: exit code 0"),
        ("print('no luck'); sys.exit(3)", "exit code 3; its last lines: no luck"),
        ("os.kill(os.getpid(), 9)", "signal 9"),
        (
            "ask('a'); raise ValueError('broken')",
            "the program failed: exit code 1.*ValueError: broken",
        ),
        ("ask('a')", "reported no result"),
        ("ask('a'); report(reward=float('nan'))", "program=nan, expected a finite number"),
        ("ask('a'); report(reward='1')", "expected a finite number"),
        ("ask('a'); report(reward=True)", "expected a finite number"),
        ("ask('a'); report(reward=1, rewards={'chatcmpl-9': 1})", "the id of no response"),
        ("ask('a'); report(reward=1, score=2)", "score is not known"),
        ("ask('a'); open(os.environ['RAGEN_RESULT'], 'w').write('{')", "no JSON"),
    ],
)
def test_an_episode_without_a_result_fails_with_the_reason(play, script, body, found):
    (episode,) = play(script(body))
    assert episode.status is EpisodeStatus.FAILED
    assert re.search(found, episode.error, flags=re.DOTALL), episode.error


HANGING = """
if SEED == 0:
    time.sleep(600)
if SEED == 1:
    ask("a")
    time.sleep(600)
if SEED == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.close(1)
    os.close(2)
    ask("a")
    time.sleep(600)
if SEED == 3:
    ask("a")
    report(reward=1)
    while True: pass
if SEED < 32:
    time.sleep(600)
"""


@pytest.mark.parametrize("shuffled", [False, True])
def test_programs_that_hang_fail_at_their_time_limit_and_hold_up_no_other(play, script, shuffled):
    """Before, between and after calls, with engines that wait for all and that do not."""
    hanging = HANGING.replace("while True: pass", "time.sleep(600)").replace(
        "SEED < 32", "SEED < 5"
    )
    episodes = play(
        script(hanging + SPEAK),
        episodes=12,
        num_envs=12,
        workers=12,
        program_s=20.0,
        shuffled=shuffled,
    )
    assert {episode.status for episode in episodes[:10]} == {EpisodeStatus.FAILED}
    assert all("took longer than env.kwargs.program_s=20" in one.error for one in episodes[:10])
    assert [episode.reward for episode in episodes[10:]] == [0.5] * 2


@pytest.mark.soak
def test_64_programs_that_hang_at_once_hold_up_no_other(play, script):
    """Some of them busy all the time."""
    episodes = play(
        script(HANGING + SPEAK), episodes=68, num_envs=68, workers=68, program_s=60.0, shuffled=True
    )
    assert {episode.status for episode in episodes[:64]} == {EpisodeStatus.FAILED}
    assert [episode.reward for episode in episodes[64:]] == [0.5] * 4


def test_nothing_outlives_a_program(play, script, tmp_path):
    """Children in sessions of their own, and what it has written."""
    child = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(60)"
    body = f"""
child = subprocess.Popen([sys.executable, "-S", "-c", {child!r}], stdout=subprocess.PIPE)
number = child.stdout.readline().decode().strip()
with open({str(tmp_path / "number")!r}, "w") as file:
    file.write(number + " " + os.getcwd())
ask("a")
report(reward=1)
"""
    (episode,) = play(script(body))
    assert episode.status is EpisodeStatus.TERMINATED, episode.error
    number, folder = (tmp_path / "number").read_text().split()
    assert not Path(f"/proc/{number}").exists()
    assert not Path(folder).exists()


def test_output_and_files_are_limited(play, script):
    body = """
print("x" * 20_000_000, flush=True)
try:
    with open("big", "wb") as file:
        for _ in range(4):
            file.write(bytes(1 << 20))
            file.flush()
except OSError as error:
    print("refused", flush=True)
ask("a")
report(reward=1)
"""
    body = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + body
    (episode,) = play(script(body), file_mb=2, output_kb=4)
    assert episode.status is EpisodeStatus.TERMINATED, episode.error
    output = episode.turns[-1].info["program"]["output"]
    assert len(output) == 4096 and output.endswith("refused\n")


def test_memory_is_limited(play, script):
    body = "ask('a')\nbytes(1 << 30)"
    (episode,) = play(script(body), memory_mb=256)
    assert "MemoryError" in episode.error


def test_an_owner_that_is_killed_leaves_no_program(script, tmp_path):
    body = f"open({str(tmp_path / 'number')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    owner = f"""
from ragen_pl.programs.environment import ProgramEnvironment
ProgramEnvironment(command={script(body)!r}).reset(seed=0)
"""
    process = subprocess.Popen([sys.executable, "-c", owner])
    number = tmp_path / "number"
    while not (number.exists() and number.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    while Path(f"/proc/{number.read_text()}").exists():
        time.sleep(0.01)


def test_functions_run_in_forks_and_return_their_result(play, tmp_path, monkeypatch):
    (tmp_path / "agents_of_test.py").write_text(
        "import os\n"
        "LOADED = os.getpid()\n"
        "async def agent(task):\n"
        "    from chat import ask, said\n"
        "    text = said(ask(task['question']))\n"
        "    return {'reward': float(len(text)), 'info': {'fork': os.getpid() != LOADED}}\n"
        "def tasks():\n"
        "    return [{'question': 'who?'}]\n"
    )
    (tmp_path / "chat.py").write_text(CLIENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (episode,) = play(None, function="agents_of_test.agent", tasks="agents_of_test.tasks")
    assert episode.reward == 6.0, episode.error
    assert episode.turns[0].observation.text == "user: who?"
    assert episode.turns[0].info["program"]["fork"]


def test_a_function_that_cannot_be_imported_says_so(play):
    (episode,) = play(None, function="no_such_module.agent")
    assert "ModuleNotFoundError" in episode.error


def test_tasks_come_from_files(play, script, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"question": "a"}\n\n{"question": "b"}\n')
    command = script("ask(TASK['question']); report(reward=1)")
    episodes = play(command, tasks=str(tmp_path / "tasks.jsonl"), episodes=12)
    asked = [episode.turns[0].observation.text for episode in episodes]
    assert set(asked) == {"user: a", "user: b"}
    # members of a group have the same task
    assert asked[::2] == asked[1::2]


def test_parallel_calls_of_a_session_are_all_answered(play, script):
    body = """
answers = [None] * 8
def one(number):
    answers[number] = said(ask(f"call {number}"))
threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
report(reward=len(set(answers)))
"""
    (episode,) = play(script(body))
    assert episode.reward == 8.0
    assert len(episode.turns) == 8


def test_trajectories_do_not_depend_on_the_number_of_programs_at_once(play, script, native_lm):
    command = script(SPEAK)
    played = [
        play(
            command,
            engine=TransformersEngine(PolicyModule(native_lm)),
            episodes=6,
            num_envs=num_envs,
            workers=workers,
        )
        for num_envs, workers in ((1, 1), (6, 3), (64, 8))
    ]
    expected = responses(played[0])
    assert len(expected) == 18
    assert all(responses(one) == expected for one in played[1:])


@pytest.mark.parametrize(
    ("kwargs", "found"),
    [
        ({"command": None}, "env.command=None, env.function=None: set one of them"),
        ({"command": ["a"], "function": "b.c"}, "set one of them"),
        ({"command": ["a"], "tasks": "no_file.jsonl"}, "env.tasks=no_file.jsonl"),
        ({"command": ["a"], "models": {"judge": {}}}, "env.kwargs.models.judge: it has no url"),
        (
            {"command": ["a"], "models": {"judge": {"url": "x", "key_env": "NO_SUCH"}}},
            "key_env=NO_SUCH: no such environment variable",
        ),
    ],
)
def test_bad_settings_name_the_key(kwargs, found):
    from ragen_pl.programs.environment import ProgramEnvironment

    with pytest.raises(ValueError, match=found):
        ProgramEnvironment(**kwargs)
