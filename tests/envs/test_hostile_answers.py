"""Every shipped environment gets random and adversarial answers, judged as in a rollout.

The long test plays 10,000 and 1,000 in the environments whose libraries are installed:
`pytest -m soak tests/envs/test_hostile_answers.py`.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf
from support.episodes.hostile import hostile_answers, random_answers

from envs.adapters.reasoning_gym import ReasoningGym
from envs.tools import ToolEnvironment
from ragen_pl.environments.calls import manager_settings
from ragen_pl.environments.manager import EnvironmentManager, EnvironmentSlot, EpisodeSpec
from ragen_pl.prompts.parsing import parse_response

CONF = Path(__file__).parents[2] / "conf" / "env"
NEED_A_TARGET = {"custom", "openenv", "program", "mixture"}
HEAVY = {
    "arithmetic", "countdown", "metaworld", "mini_sudoku", "miniwob", "miniworld", "reasoning_gym",
    "textarena", "textarena_two_player", "textworld", "word_problem",
}  # fmt: skip
NAMES = sorted({path.stem for path in CONF.glob("*.yaml")} - NEED_A_TARGET)
# environments that take 10 ms or more for an answer, and how many times fewer they get
FEWER = {"code": 10, "gym_visual": 10, "metaworld": 3, "miniworld": 3, "miniwob": 3}
# a game may refuse what it has taken before
REFUSES_REPEATS = "ragen_pl.envs.adapters.textarena."
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
LONGEST_OBSERVATION = 5_000


def environment_settings(name: str) -> Any:
    """Return the node `env` of a shipped file."""
    node: Any = OmegaConf.load(CONF / f"{name}.yaml")
    bases = [base for base in node.get("defaults", []) if isinstance(base, str)]
    return OmegaConf.merge(*map(environment_settings, bases), node.env)


def judge(name: str, *, random: int, adversarial: int) -> tuple[int, int]:
    """Give answers to an environment, check what a rollout records of each, and count valid and invalid ones."""
    settings: DictConfig = environment_settings(name)
    settings.merge_with({"invalid_ends": False, "max_turns": 60})
    manager, rng = EnvironmentManager(**manager_settings(settings)), np.random.default_rng(0)
    (slot,) = manager.open([EpisodeSpec(group=0, member=0, seed=0)])

    def answers() -> Iterator[tuple[str, bool]]:
        yield from random_answers(
            rng, random, lambda: slot.action_text(slot.members.random_action(rng))
        )
        for answer in hostile_answers(rng, adversarial):
            yield answer, False

    counts = [0, 0]
    try:
        for number, (answer, good) in enumerate(answers()):
            assert slot.error is None, slot.error
            valid, over = answered(manager, slot, answer, good=good)
            counts[valid] += 1
            if over:
                manager.close([slot])
                (slot,) = manager.open([EpisodeSpec(group=0, member=0, seed=number % 50)])
    finally:
        slot.env.close()
    return counts[True], counts[False]


def answered(
    manager: EnvironmentManager, slot: EnvironmentSlot, answer: str, *, good: bool
) -> tuple[bool, bool]:
    """Carry out an answer and return whether it was valid and whether it ended the episode."""
    shown = repr(answer[:200])
    expected = expected_validity(slot, answer)
    if good and not manager.target.startswith(REFUSES_REPEATS):
        expected = True
    response = parse_response(
        f"<think>a</think><answer>{answer}</answer>",
        slot.action_names,
        prompt_format=manager.prompt_format,
    )
    (result,) = manager.step([slot], [response])
    assert result.error is None, f"{shown}: {result.error}"
    terms, text = result.reward_terms, result.observation.text
    assert expected in (None, result.valid), shown
    assert all(math.isfinite(value) for value in terms.values()), shown
    assert ("format" in terms) == (not result.valid), shown
    if not result.valid:
        paid = sum(terms.values()) - terms["format"]
        assert paid <= 0 and not result.success, shown
    assert len(text) <= LONGEST_OBSERVATION and text.encode(), shown
    return result.valid, result.status is not None


def expected_validity(slot: EnvironmentSlot, answer: str) -> bool | None:
    """Return whether an answer is valid, or None where its environment alone can tell."""
    stripped, longest = answer.strip(), slot.members.max_action_length
    if not stripped or any(tag in answer for tag in TAGS):
        return False
    if slot.action_names is not None:
        names = {name.casefold() for name in slot.action_names}
        return all(part.strip().casefold() in names for part in answer.split("||"))
    assert longest is not None
    if len(stripped) > longest:
        return False
    environment = slot.env.unwrapped
    return is_call(environment, stripped) if isinstance(environment, ToolEnvironment) else None


def is_call(environment: ToolEnvironment, text: str) -> bool:
    """Return whether a text calls a tool with arguments of the types of its signature."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(call, dict) or not {"name"} <= call.keys() <= {"name", "arguments"}:
        return False
    name, arguments = call["name"], call.get("arguments", {})
    if not isinstance(name, str) or name not in environment.tools:
        return False
    tool = getattr(environment, name)
    hints, parameters = get_type_hints(tool), inspect.signature(tool).parameters
    if not isinstance(arguments, dict) or arguments.keys() != parameters.keys():
        return False
    return all(has_type(value, hints[key]) for key, value in arguments.items())


def has_type(value: Any, annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return type(value) is str and value in get_args(annotation)
    # a lone surrogate is no text
    if type(value) is str and any("\ud800" <= character <= "\udfff" for character in value):
        return False
    return type(value) is annotation


def counts_of(name: str, *, random: int, adversarial: int) -> dict[str, int]:
    times = FEWER.get(name, 1)
    return {"random": random // times, "adversarial": adversarial // times}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.environments] if name in HEAVY else [])
        for name in NAMES
    ],
)
def test_answers_are_judged_and_cost_no_episode(name: str) -> None:
    counts = counts_of(name, random=200, adversarial=200)
    valid, invalid = judge(name, **counts)
    assert valid + invalid == sum(counts.values())
    assert valid >= counts["random"] // 4 and invalid >= counts["adversarial"] // 4


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_many_answers_are_judged_and_cost_no_episode(name: str) -> None:
    counts = counts_of(name, random=10_000, adversarial=1_000)
    try:
        valid, invalid = judge(name, **counts)
    except ImportError as error:
        if name not in HEAVY:
            raise
        pytest.skip(str(error))
    print(f"{name}: {valid} valid, {invalid} invalid")
    assert valid + invalid == sum(counts.values())


class _Recorded:
    """Data set of one question, which records what its scorer reads."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"question": "?", "answer": "1/2", "metadata": {}}

    def score_answer(self, text: str, item: dict[str, Any]) -> float:
        self.read.append(text)
        return float(text in ("1/2", "F2 U", "A+2"))


@pytest.mark.parametrize(
    ("dataset", "right", "endless"),
    [
        ("coin_flip", "1/2", ["1e99999999", "5E-99999999", "1e9_9_9_9_9_9", "1e,-99,99,99"]),
        ("rubiks_cube", "F2 U", ["F99999999999", "U 999"]),
        ("rush_hour", "A+2", ["A+99999999999"]),
    ],
)
def test_no_scorer_of_reasoning_gym_computes_for_ever(monkeypatch, dataset, right, endless):
    data = _Recorded()
    monkeypatch.setattr("envs.adapters.reasoning_gym._dataset", lambda *_: data)
    env = ReasoningGym(dataset=dataset, tries=9)
    env.reset(seed=0)
    assert [env.step(text)[4]["success"] for text in endless] == [False] * len(endless)
    assert not set(endless) & set(data.read)
    assert env.step(right)[4]["success"]
