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


def test_rewards_of_calls_stand_where_they_were_earned(play, script):
    body = """
first, second = ask("a"), ask("b")
report(reward={"task": 1.0, "time": -0.25}, success=True, rewards={first["id"]: 0.5, second["id"]: {"tool": 0.125}},
       invalid=[first["id"]], info={"note": "x"})
"""
    (episode,) = play(script(body))
    first, second = episode.turns
    # the trainer's penalty of an invalid response
    assert first.reward_terms == {"environment/program": 0.5, "format": -0.05}
    assert not first.action_is_valid and second.action_is_valid
    assert second.reward_terms == {
        "environment/task": 1.0,
        "environment/time": -0.25,
        "environment/tool": 0.125,
    }
    assert second.info["program"]["note"] == "x"
    assert episode.reward == 1.325


def test_a_response_that_is_malformed_and_called_invalid_is_penalized_once(play, script):
    body = """
tools = [{"type": "function", "function": {"name": "price"}}]
answer = ask("a", tools=tools)
report(reward=1, invalid=[answer["id"]])
"""
    (episode,) = play(script(body), lambda *_: '<tool_call>{"name": 3}</tool_call>')
    (turn,) = episode.turns
    assert not turn.action_is_valid
    assert turn.reward_terms == {"environment/program": 1.0, "format": -0.05}


def test_rewards_over_http_have_a_key_of_their_own(play, script):
    body = """
answer = ask("a")
with_session_key = post("/rewards", {"id": answer["id"], "reward": 5})
key = os.environ.get("RAGEN_REWARD_KEY", "none")
posted = post("/rewards", {"id": answer["id"], "reward": 0.5}, key=key)
report(reward=1, info={"refused": with_session_key["status"], "posted": posted.get("status", 200)})
"""
    (episode,) = play(script(body), post_rewards=True)
    assert episode.reward == 1.5
    assert episode.turns[0].info["program"]["refused"] == 401
    (episode,) = play(script(body))
    assert episode.reward == 1.0
    assert episode.turns[0].info["program"]["posted"] == 401


def test_a_verifier_judges_in_the_programs_folder(play, script, tmp_path):
    verifier = tmp_path / "verify.py"
    verifier.write_text(
        "import json, os\nprint('looking')\n"
        "print(json.dumps({'reward': float(open('made').read()), 'success': True}))"
    )
    body = "ask('a')\nopen('made', 'w').write('0.75')\nreport(reward=100)"
    (episode,) = play(script(body), verifier=[sys.executable, str(verifier)])
    assert episode.reward == 0.75 and episode.success
    verifier.write_text("raise SystemExit('no')")
    (episode,) = play(script(body), verifier=[sys.executable, str(verifier)])
    assert "env.verifier" in episode.error and "exit code 1; its last lines: no" in episode.error


def test_a_crash_costs_its_reward_where_one_is_set(play, script):
    (episode,) = play(script("ask('a'); sys.exit(3)"), crash_reward=-1.0)
    assert episode.status is EpisodeStatus.TERMINATED and episode.reward == -1.0


def test_calls_above_the_limit_are_refused_and_the_program_may_still_report(play, script):
    body = """
answers = [ask("a") for _ in range(4)]
report(reward=1, info={"codes": [answer.get("error", {}).get("code") for answer in answers]})
"""
    (episode,) = play(script(body), max_calls=2)
    assert len(episode.turns) == 2 and episode.reward == 1.0
    codes = episode.turns[-1].info["program"]["codes"]
    assert codes == [None, None, "call_limit", "call_limit"]


def test_a_program_that_calls_in_an_endless_loop_ends(play, script):
    (episode,) = play(script("while True: ask('a')"), max_calls=3, program_s=600.0)
    assert episode.status is EpisodeStatus.FAILED
    assert "goes on calling after env.max_turns=3 calls" in episode.error
    assert len(episode.turns) == 3


def test_a_prompt_that_is_too_long_is_refused_and_no_turn(play, script):
    """The program compacts its history and goes on."""
    body = """
long = ask("x" * 3000)
short = ask("y")
report(reward=1, info={"code": long["error"]["code"], "status": long["status"]})
"""
    (episode,) = play(script(body), max_tokens=400)
    assert [turn.observation.text for turn in episode.turns] == ["user: y"]
    assert episode.turns[0].info["program"]["code"] == "context_length_exceeded"
    assert episode.turns[0].info["program"]["status"] == 400
    assert episode.turns[0].response_text == "word 0"
    assert episode.reward == 1.0


def test_a_refusal_at_the_end_leaves_the_reward_to_the_last_turn(play, script):
    (episode,) = play(script("ask('a'); ask('x' * 3000); report(reward=1)"), max_tokens=400)
    assert episode.status is EpisodeStatus.TERMINATED
    assert [turn.reward for turn in episode.turns] == [1.0]


def test_tool_calls_reach_the_program_and_their_results_the_policy(play, script):
    schema = {"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}
    body = f"""
messages = [{{"role": "user", "content": "tea?"}}]
answer = ask(messages, tools=[{schema!r}])["choices"][0]
message = answer["message"]
call = message["tool_calls"][0]
messages += [message, {{"role": "tool", "tool_call_id": call["id"], "content": "3 coins"}}]
ask(messages, tools=[{schema!r}])
arguments = json.loads(call["function"]["arguments"])
report(reward=1, info={{"why": answer["finish_reason"], "content": message["content"], **arguments}})
"""
    called = 'so<tool_call>{"name": "price", "arguments": {"article": "tea"}}</tool_call>'
    (episode,) = play(script(body), lambda _, turn: called if turn == 0 else "3 coins it is")
    first, second = episode.turns
    told = second.info["program"]
    assert (told["why"], told["content"], told["article"]) == ("tool_calls", "so", "tea")
    assert first.actions == ['{"name": "price", "arguments": {"article": "tea"}}']
    assert second.history == "joined" and second.observation.text == "tool: 3 coins"


@pytest.mark.parametrize(
    ("text", "valid", "reason", "content"),
    [
        (
            '<tool_call>{"name": "price", "argu',
            False,
            "length",
            '<tool_call>{"name": "price", "argu',
        ),
        ('<tool_call>{"name": 3}</tool_call>', False, "stop", '<tool_call>{"name": 3}</tool_call>'),
        ("plain", True, "stop", "plain"),
    ],
)
def test_malformed_and_cut_calls_are_told_and_penalized(
    play, script, native_lm, text, valid, reason, content
):
    tokens = len(native_lm.tokenizer(text)["input_ids"])
    limit = tokens if reason == "length" else 128
    body = (
        f"limit = {limit}"
        + """
tools = [{"type": "function", "function": {"name": "price"}}]
answer = ask("a", tools=tools, max_tokens=limit)["choices"][0]
report(reward=1, info={"why": answer["finish_reason"], "content": answer["message"]["content"]})
"""
    )
    (episode,) = play(script(body), lambda *_: (text, reason != "length"))
    (turn,) = episode.turns
    assert turn.action_is_valid == valid
    assert turn.reward_terms.get("format", 0.0) == (0.0 if valid else -0.05)
    assert turn.info["program"]["why"] == reason and turn.info["program"]["content"] == content


def test_stop_strings_and_single_calls_cut_what_is_trained(play, script):
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    body = """
tools = [{"type": "function", "function": {"name": "f"}}]
one = ask("a", stop=["STOP", "never"])
two = ask("b", tools=tools, parallel_tool_calls=False)
report(reward=1, info={"said": said(one), "calls": len(two["choices"][0]["message"]["tool_calls"])})
"""
    write = lambda _, turn: "before STOP after" if turn == 0 else call + call  # noqa: E731
    (episode,) = play(script(body), write)
    first, second = episode.turns
    assert second.info["program"] | {"output": "", "requests": {}} == {
        "said": "before ",
        "calls": 1,
        "output": "",
        "requests": {},
    }
    assert first.response_text == "before STOP" and second.response_text == call
    assert len(first.response_ids) == len(first.response_logprobs) == len(first.spans)
    assert not first.hit_length_limit


def test_responses_that_are_not_trained_are_marked(play, script):
    body = """
ask("a", headers={"x-train": "false"})
ask("b", metadata={"train": "false"})
ask("c", metadata={"advances": "false"})
ask("d")
report(reward=1)
"""
    (episode,) = play(script(body))
    assert [turn.trained for turn in episode.turns] == [False, False, True, True]
    assert [turn.advances for turn in episode.turns] == [True, True, False, True]


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
