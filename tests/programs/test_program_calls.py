"""Calls of a program: rewards, limits, tools and responses that are not trained."""

from __future__ import annotations

import sys

import pytest

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
