"""Agent programs as environments: requests, answers, endings, results and what may not disturb others."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.episodes.small_lakes import Module
from support.episodes.trajectories import responses
from support.servers.program_client import CLIENT, SPEAK

from ragen_pl.agent_programs.tasks import load_tasks, split_tasks
from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.settings import IterationSettings
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.metrics.rollout import RolloutStatistics
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.hint import Hint
from ragen_pl.rewards.judged import JudgedReward, RubricJudge
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.trajectory import EpisodeStatus


def test_a_program_is_an_episode(play, script):
    (episode,) = play(script(SPEAK))
    assert episode.status is EpisodeStatus.TERMINATED and episode.error is None
    assert episode.success and episode.reward == 0.5
    assert [turn.response_text for turn in episode.turns] == ["word 0", "word 1", "word 2"]
    assert [turn.kind.history for turn in episode.turns] == ["first", "joined", "joined"]
    assert episode.turns[1].observation.text == "user: turn 1 of 0"
    assert episode.turns[-1].reward_terms == {"environment/program": 0.5}
    assert episode.turns[-1].info["program"]["output"] == "done\n"
    for before, after in zip(episode.turns, episode.turns[1:], strict=False):
        known = np.concatenate([before.prompt_ids, before.response_ids])
        assert np.array_equal(after.prompt_ids[: len(known)], known)


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
    assert second.kind.history == "joined" and second.observation.text == "tool: 3 coins"
    assert second.actions == ["3 coins it is"]


def test_a_program_that_ends_with_words_says_whether_its_task_is_solved(play, script):
    schema = {"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}
    body = f"""
ask("tea?", tools=[{schema!r}])
ask("and now?", tools=[{schema!r}])
report(reward=0, success=False)
"""
    called = '<tool_call>{"name": "price", "arguments": {}}</tool_call>'
    # words, no words, and a response that is not valid
    for last in ("3 coins", "", '<tool_call>{"name": 3}</tool_call>'):
        said = {0: called, 1: last}
        (episode,) = play(script(body), lambda _, turn, said=said: said[turn])
        assert episode.says_success is True and not episode.is_silent
        metrics = RolloutStatistics()
        metrics.update([episode])
        assert "success_reported" not in metrics.compute()


def test_words_of_a_program_are_judged(play, script):
    """Not those that the policy is not trained on, or that are no step of the task."""
    body = """
ask("say please")
ask("and thanks")
ask("is that polite?", metadata={"train": "false"})
ask("take notes", metadata={"advances": "false"})
report(reward=0)
"""
    says = ["please", "<think>thanks</think>no", "please", "please"]
    judge = RubricJudge(criteria={"polite": {"pattern": "please", "points": 1.0}})
    (episode,) = play(script(body), lambda _, turn: says[turn])
    JudgedReward(judge=judge, weight=1.0, scope="turn")([episode], gather=lambda each: [each])
    assert [turn.reward_terms.get("judge") for turn in episode.turns] == [1.0, 0.0, None, None]


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


def test_a_stop_string_at_the_length_limit_ends_the_response(play, script, native_lm):
    tokens = len(native_lm.tokenizer("before STOP")["input_ids"])
    body = """
answer = ask("a", stop=["STOP"])["choices"][0]
report(reward=1, info={"said": answer["message"]["content"], "why": answer["finish_reason"]})
"""
    write = lambda *_: ("before STOP", False)  # noqa: E731
    (episode,) = play(script(body), write, max_response_tokens=tokens)
    (turn,) = episode.turns
    assert turn.info["program"]["why"] == "stop" and turn.info["program"]["said"] == "before "
    assert turn.action_is_valid and not turn.hit_length_limit and "format" not in turn.reward_terms


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
    assert [turn.is_task_step for turn in episode.turns] == [True, True, False, True]


@pytest.mark.parametrize(
    ("train", "hint", "problem"),
    [
        ("false", None, "no response is trained on"),
        ("true", Hint(template="{observation} be brief"), "request has no place for a hint"),
    ],
)
def test_a_program_that_leaves_nothing_to_learn_ends_the_run_in_one_line(
    script, native_lm, train, hint, problem
):
    command = script(f'ask("a", metadata={{"train": "{train}"}})\nreport(reward=1)')
    manager = EnvironmentManager(
        target="ragen_pl.agent_programs.environment.ProgramEnvironment",
        kwargs={"command": command, "program_s": 20.0},
        prompt_format=PromptFormat.NATIVE,
        timeout_s=None,
    )
    context = ContextManager(native_lm, window="all", system_prompt=None)
    proxy = AgentProxy(environments=manager, context=context, hint=hint, max_response_tokens=4)
    data = RolloutDataModule(proxy, iteration=IterationSettings(groups=2))
    with pytest.raises(RolloutError, match=problem):
        data.collect(0, Module(native_lm))


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


def lines(file, *questions):
    file.write_text("".join(f'{{"question": "{one}"}}\n' for one in questions))
    return str(file)


def test_tasks_of_validation_are_not_those_of_training(tmp_path):
    """By their content: from another file, or a fraction of all; and training has no other ones than those."""
    tasks = lines(tmp_path / "tasks.jsonl", *"abcdefghij", *"abc")
    other = lines(tmp_path / "other.jsonl", "j", "k")
    asked = lambda rows: {row["question"] for row in rows}  # noqa: E731
    training, validation = split_tasks(tasks, other)
    assert (asked(training), asked(validation)) == (set("abcdefghi"), set("jk"))
    training, validation = split_tasks(tasks, 0.25)
    assert len(asked(validation)) == 3 and len(asked(training)) == 7
    assert asked(training) | asked(validation) == set("abcdefghij")
    # the order of the lines does not matter
    turned = lines(tmp_path / "turned.jsonl", *"jihgfedcba")
    assert asked(split_tasks(turned, 0.25)[1]) == asked(validation)
    assert split_tasks(tasks, None) == (load_tasks(tasks), load_tasks(tasks))
    for held_out, found in ((tasks, "all tasks of env.tasks"), (str(tmp_path / "no"), "no such")):
        with pytest.raises(ValueError, match=rf"env\.validation_tasks={held_out}: {found}"):
            split_tasks(tasks, held_out)
    with pytest.raises(ValueError, match="has one task only"):
        split_tasks(lines(tmp_path / "one.jsonl", "a", "a"), 0.5)


def test_texts_of_tasks_may_hold_any_line_ends(tmp_path):
    texts = ["a\u2028b", "a\u2029b", "a\u0085b", "a\x7fb"]
    rows = [json.dumps({"question": text}, ensure_ascii=False) for text in texts]
    for end in ("\n", "\r\n"):
        file = tmp_path / f"{len(end)}.jsonl"
        file.write_bytes("".join(f"{row}{end}" for row in rows).encode())
        assert [task["question"] for task in load_tasks(str(file))] == texts


def test_validation_plays_the_tasks_that_training_leaves_out(script, tmp_path):
    command = script("ask(TASK['question']); report(reward=1)")
    tasks = lines(tmp_path / "tasks.jsonl", *"abcdef")
    manager = EnvironmentManager(
        target="ragen_pl.agent_programs.environment.ProgramEnvironment",
        kwargs={"command": command, "tasks": tasks, "validation_tasks": 0.5},
        prompt_format=PromptFormat.NATIVE,
        timeout_s=None,
        workers=6,
    )

    def played(held_out):
        specs = [
            EpisodeSpec(group=seed, member=0, seed=seed, held_out=held_out) for seed in range(24)
        ]
        slots = manager.open(specs)
        assert not any(slot.error for slot in slots)
        keys = set(manager.state_keys(slots))
        manager.close(slots)
        return keys

    training, validation = played(False), played(True)
    assert len(training) == len(validation) == 3 and training.isdisjoint(validation)
    assert manager.redraws == 0
    manager.close_idle()


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
    from ragen_pl.agent_programs.environment import ProgramEnvironment

    with pytest.raises(ValueError, match=found):
        ProgramEnvironment(**kwargs)
