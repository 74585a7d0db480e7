"""Rewards of agent programs: of the result, of single responses, over HTTP, by a verifier, of a crash."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from ragen_pl.agent_programs import running
from ragen_pl.agent_programs.variables import Secrets
from ragen_pl.data.collate import collate
from ragen_pl.trajectory import EpisodeStatus


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


def test_trained_responses_do_not_pay_for_the_form_of_others(play, script, native_lm):
    """The response of a judge is malformed, and called invalid too; the first one is trained on."""
    body = """
tools = [{"type": "function", "function": {"name": "price"}}]
ask("a")
judge = ask("b", tools=tools, metadata={"train": "false"})
other = ask("c", metadata={"train": "false"})
ask("d", tools=tools)
report(reward=1, invalid=[judge["id"], other["id"]])
"""
    write = lambda _, turn: '<tool_call>{"name": 3}</tool_call>' if turn in (1, 3) else "good"  # noqa: E731
    (episode,) = play(script(body), write)
    assert [turn.trained for turn in episode.turns] == [True, False, False, True]
    assert [turn.action_is_valid for turn in episode.turns] == [True, False, False, False]
    assert [turn.reward_terms for turn in episode.turns] == [
        {}, {}, {}, {"format": -0.05, "environment/program": 1.0},
    ]  # fmt: skip
    rewards = collate([episode], native_lm).episodes.turn_rewards
    assert rewards.tolist() == [[0.0, pytest.approx(0.95)]]


def test_a_part_of_a_response_has_one_reward(play, script):
    """Given again with the same value it counts once, and other parts add up; another value is refused."""
    body = """
answer = ask("a")
def give(reward):
    body = {"id": answer["id"], "reward": reward}
    return post("/rewards", body, key=os.environ["RAGEN_REWARD_KEY"]).get("status", 200)
judge = {"judge": 0.5}
rewards = (judge, judge, {"tool": 0.25, "judge": 1}, 2, {"tool": 0.125}, "x")
statuses = [give(reward) for reward in rewards]
report(reward=1, rewards={answer["id"]: AGAIN}, info={"statuses": statuses})
"""
    (episode,) = play(script(body.replace("AGAIN", '{"judge": 0.5}')), post_rewards=True)
    (turn,) = episode.turns
    assert turn.info["program"]["statuses"] == [200, 200, 400, 200, 200, 400]
    assert turn.reward_terms == {
        "environment/judge": 0.5,
        "environment/tool": 0.125,
        # of the response and of the end
        "environment/program": 2.0 + 1.0,
    }
    (episode,) = play(script(body.replace("AGAIN", "-2")), post_rewards=True)
    assert episode.status is EpisodeStatus.FAILED
    assert "has program=2 already, and -2 is given" in episode.error


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
    verifier.write_text(
        "import sys\n"
        "sys.stdout.reconfigure(encoding='utf-8')\n"
        """print('{"reward": 0.5, "info": {"note": "a\\u2028b"}}')\n"""
    )
    (episode,) = play(script(body), verifier=[sys.executable, str(verifier)])
    assert episode.reward == 0.5 and episode.turns[0].info["program"]["note"] == "a\u2028b"
    verifier.write_text("raise SystemExit('no')")
    (episode,) = play(script(body), verifier=[sys.executable, str(verifier)])
    assert "env.verifier" in episode.error and "exit code 1; its last lines: no" in episode.error


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("print('1 failed: no tea')\nsys.exit(2)", "exit code 2; its last lines: 1 failed: no tea"),
        ("print('1 failed')\nsys.exit('no tea')", "exit code 1; its last lines: 1 failed | no tea"),
        ("print('x\\n' * 1000)\nraise ValueError('no tea')", "ValueError: no tea"),
        ("os.kill(os.getpid(), 9)", "signal 9"),
        ("print('1 passed')", "no JSON (Extra data: line 1 column 3 (char 2)): '1 passed'"),
    ],
)
def test_a_verifier_that_fails_says_why(play, script, tmp_path, body, reason):
    verifier = tmp_path / "verify.py"
    verifier.write_text(f"import os, sys\n{body}\n")
    command = [sys.executable, "-S", str(verifier)]
    (episode,) = play(script("ask('a')\nreport(reward=1)"), verifier=command)
    assert episode.status is EpisodeStatus.FAILED and reason in episode.error, episode.error


# writes the number of a process that holds its output
LEAVES_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
"""


@pytest.mark.parametrize(
    ("ending", "program_s", "reason"),
    [
        ("time.sleep(100)", 8.0, "it took longer than env.kwargs.program_s=8 s"),
        ("while True: print('x' * 100_000)", 60.0, "it wrote more than 1000000 bytes"),
    ],
)
def test_what_a_verifier_has_started_is_killed_with_it(
    play, script, tmp_path, monkeypatch, ending, program_s, reason
):
    monkeypatch.setattr(running, "_MAX_OUTPUT", 1_000_000)
    number, verifier = tmp_path / "number", tmp_path / "verify.py"
    verifier.write_text(LEAVES_A_CHILD + ending)
    command = [sys.executable, "-S", str(verifier), str(number)]
    (episode,) = play(script("ask('a')"), verifier=command, program_s=program_s)
    assert reason in episode.error
    stat = Path(f"/proc/{number.read_text()}/stat")
    assert not stat.exists() or ") Z " in stat.read_text()


def test_what_a_verifier_leaves_behind_keeps_its_result_back_no_longer(play, script, tmp_path):
    number, verifier = tmp_path / "number", tmp_path / "verify.py"
    verifier.write_text(LEAVES_A_CHILD + "print('{\"reward\": 1}')")
    command = [sys.executable, "-S", str(verifier), str(number)]
    (episode,) = play(script("ask('a')"), verifier=command, program_s=50.0)
    os.kill(int(number.read_text()), signal.SIGKILL)
    assert episode.error is None and episode.reward == 1


def test_a_crash_costs_its_reward_where_one_is_set(play, script):
    (episode,) = play(script("ask('a'); sys.exit(3)"), crash_reward=-1.0)
    assert episode.status is EpisodeStatus.TERMINATED and episode.reward == -1.0


def test_a_verifier_gets_the_variables_of_a_program_and_a_home_of_its_own(
    play, script, tmp_path, monkeypatch
):
    """Not the trainer's, nor the folder in which the program may leave modules for it."""
    monkeypatch.setenv("WANDB_API_KEY", "trainers")
    monkeypatch.setenv("SHOP_KEY", "shops")
    verifier = tmp_path / "verify.py"
    verifier.write_text(
        "import json, os\n"
        "names = ('WANDB_API_KEY', 'SHOP_KEY', 'SHOP', 'OPENAI_API_KEY')\n"
        "found = {name: os.environ.get(name, '') != '' for name in names}\n"
        "home = os.environ['HOME']\n"
        "print(json.dumps({'reward': 1, 'info': {**found, 'home': os.listdir(home), 'here': os.listdir()}}))"
    )
    (episode,) = play(
        script("ask('a')\nopen('made', 'w').close()"),
        verifier=[sys.executable, str(verifier)],
        variables={"SHOP": "north"},
        variables_env=["SHOP_KEY"],
    )
    assert episode.error is None
    found = episode.turns[-1].info["program"]
    assert [found[name] for name in ("WANDB_API_KEY", "SHOP_KEY", "SHOP", "OPENAI_API_KEY")] == [
        False, True, True, False,
    ]  # fmt: skip
    assert found["home"] == [] and found["here"] == ["made"]


def test_variables_that_are_passed_on_stand_in_nothing_that_is_kept(play, script, monkeypatch):
    monkeypatch.setenv("SHOP_KEY", "very-secret")
    body = """
key = os.environ["SHOP_KEY"]
print("the key is", key)
ask("a")
if SEED == 0:
    sys.exit("no shop with " + key)
report(reward=1, info={"key": key, "length": len(key)})
"""
    episodes = play(script(body), episodes=3, variables_env=["SHOP_KEY"])
    assert "no shop with $SHOP_KEY" in episodes[0].error
    kept = episodes[2].turns[-1].info["program"]
    assert (kept["output"], kept["key"], kept["length"]) == (
        "the key is $SHOP_KEY\n",
        "$SHOP_KEY",
        11,
    )
    assert not any("very-secret" in repr(episode) for episode in episodes)


def test_a_variable_that_is_not_set_is_an_error():
    from ragen_pl.agent_programs.environment import ProgramEnvironment

    with pytest.raises(ValueError, match="variables_env has NO_SUCH_KEY: no such environment"):
        ProgramEnvironment(command=["a"], variables_env=["NO_SUCH_KEY"])


@pytest.mark.parametrize("is_ascii", [True, False])
def test_a_secret_is_hidden_as_json_writes_it_and_where_it_is_a_part_of_another(
    monkeypatch, is_ascii
):
    values = {"KEY": '-----BEGIN\nMII"é\\=\n-----END', "USER_KEY": "abcd", "ADMIN_KEY": "abcdefgh"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    hidden_in = Secrets([*values]).hidden_in
    text = json.dumps({"info": values}, ensure_ascii=is_ascii)
    assert json.loads(hidden_in(text)) == {"info": {name: f"${name}" for name in values}}
    assert hidden_in("\n".join(values.values())) == "$KEY\n$USER_KEY\n$ADMIN_KEY"
