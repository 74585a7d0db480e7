"""Code: reference programs pass, others do not, and hidden tests stay hidden."""

from __future__ import annotations

import json

import numpy as np
import pytest

from envs.code import Code
from envs.sandbox.client import SANDBOX
from envs.specifications import STEPS, Kind, draw_specification, draw_value

LARGE = {"steps": 4, "examples": 4, "tests": 16, "described_fraction": 0.5}


@pytest.mark.parametrize("index", range(len(STEPS)), ids=lambda index: STEPS[index].words)
def test_the_words_the_code_and_the_function_of_a_step_agree(index):
    rng, step = np.random.default_rng(index), STEPS[index]
    for number in (1, 2, 3):
        inputs = [draw_value(rng, step.takes) for _ in range(5)]
        code = step.code.format(k=number)
        run = SANDBOX.run(f"def f(x):\n return {code}", name="f", inputs=inputs)
        assert [call["value"] for call in run.calls] == [step.apply(x, number) for x in inputs]
        assert ("{k}" in step.words) == ("{k}" in step.code)


@pytest.mark.parametrize("settings", [{}, LARGE], ids=["small", "large"])
def test_reference_programs_pass_at_the_first_attempt(settings):
    env, rng, difficulties = Code(**settings), np.random.default_rng(0), set()
    for seed in range(40):
        text, _ = env.reset(seed=seed)
        assert text.count(" = ") == env.example_count
        assert env.specification.words() in text or not env.described
        difficulties.add(env.difficulty())
        outcome, reward, over, _, info = env.step(env.optimal_action(rng))
        assert (outcome, reward, over, info["success"]) == ("all tests pass", 1.0, True, True)
    assert difficulties == set(range(1, env.max_steps + 1))


def test_a_wrong_program_costs_and_shows_an_example():
    env = Code(attempts=1000)
    env.reset(seed=1)
    example = env.example(env.inputs[0])
    text, reward, over, _, info = env.step("def f(x):\n return 'wrong'")
    assert text == f'{example}, not "wrong"' and (reward, over) == (-0.1, False)
    assert info["reward_parts"] == {"tests": 0.0, "attempts": -0.1} and info["action_is_valid"]
    fenced = f"```python\n{env.optimal_action(np.random.default_rng(0))}\n```"
    assert env.step(fenced)[1] == 1.0


def test_the_last_attempt_ends_the_episode():
    env = Code(attempts=2)
    env.reset(seed=0)
    assert [env.step("def f(x): return None")[2] for _ in range(2)] == [False, True]


def test_programs_that_know_the_examples_only_learn_nothing_about_the_hidden_tests():
    env = Code(attempts=3)
    for seed in range(20):
        env.reset(seed=seed)
        shown = {json.dumps(x): env.specification.apply(x) for x in env.inputs[: env.example_count]}
        table = f"import json\ntable = {shown!r}\n"
        program = "def f(x):\n return table.get(repr(x).replace(\"'\", '\"'))"
        text, _, _, _, info = env.step(table + program)
        assert text == "a hidden test fails" and not info["success"]


@pytest.mark.parametrize(
    "program",
    [
        "def f(x):\n return x",
        "def f(x):\n return 0",
        "def f(x):\n return True",
        "class Any(int):\n def __eq__(self, other): return True\ndef f(x): return Any()",
        "class Any:\n def __eq__(self, other): return True\ndef f(x): return Any()",
        "def f(x):\n return None",
        "def f(x):\n return float('nan')",
    ],
)
def test_trivial_programs_never_pass(program):
    env, wins = Code(), 0
    for seed in range(30):
        env.reset(seed=seed)
        wins += env.step(program)[4]["success"]
    assert wins == 0


@pytest.mark.parametrize("result", ["float(x)", "[x]", "str(x)", "type('Any', (int,), {})(x)"])
def test_a_result_of_another_type_is_wrong(result):
    env = Code(kinds=(Kind.NUMBER,))
    env.reset(seed=0)
    program = env.optimal_action(np.random.default_rng(0))
    assert not env.step(program.replace("return x", f"return {result}"))[4]["success"]
    assert env.step(program)[4]["success"]


def test_functions_of_every_kind_are_drawn():
    rng = np.random.default_rng(0)
    used = {
        index
        for _ in range(1000)
        for index, _ in draw_specification(rng, steps=2, kinds=list(Kind)).steps
    }
    assert used == set(range(len(STEPS)))


@pytest.mark.parametrize("setting", [{"steps": 5}, {"tests": 3}, {"kinds": []}, {"attempts": 0}])
def test_settings_out_of_range_raise(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        Code(**setting)


def test_a_function_is_one_initial_state_whatever_its_tests():
    env, inputs = Code(steps=1, kinds=("text",)), {}
    for seed in range(60):
        env.reset(seed=seed)
        inputs.setdefault(env.state_key(), []).append(env.inputs)
    assert len(inputs) <= 10 and len(max(inputs.values(), key=len)) > 1
