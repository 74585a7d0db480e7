"""Generated games of TextWorld: the solution wins, seeds repeat, only possible commands count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hostile import hostile_answers

from envs.adapters.textworld import TextWorld
from envs.policies import NoisyPolicy

pytestmark = pytest.mark.environments


@pytest.fixture(scope="module")
def env() -> TextWorld:
    return TextWorld(games=6)


def play(env: TextWorld, *, seed: int, noise: float) -> list[Any]:
    policy, rng = NoisyPolicy(noise=noise, base="optimal"), np.random.default_rng(seed)
    outcomes: list[Any] = [env.reset(seed=seed)[0], env.state_key()]
    for _ in range(8):
        outcomes += [*env.step(policy.act(env, rng)), env.state_key(), env.describe()]
        if outcomes[-5]:
            break
    return outcomes


def test_solution_wins_and_seeds_repeat(env: TextWorld) -> None:
    other, keys, random_wins = TextWorld(games=6), set(), 0
    for seed in range(12):
        solved = play(env, seed=seed, noise=0.0)
        keys.add(solved[1])
        assert solved[-3]["success"] and solved[-6] == 1.0
        assert play(env, seed=seed, noise=0.6) == play(other, seed=seed, noise=0.6)
        random_wins += play(env, seed=seed, noise=1.0)[-3]["success"]
    assert len(keys) >= 4 and random_wins <= 8
    assert TextWorld(games=6, first_game=6).reset(seed=0)[0] != env.reset(seed=0)[0]


def test_observation_tells_the_task_and_hides_what_is_closed(env: TextWorld) -> None:
    for seed in range(12):
        text = str(env.reset(seed=seed)[0])
        names = [line.partition(":")[0] for line in text.splitlines()]
        assert names == ["task", "room", "here", "carried", "exits", "commands"]
        assert env.difficulty() in (1, 2)
        facts = env._facts()
        shut = {things[0] for name, things in facts if name in ("closed", "locked")}
        hidden = {things[0] for name, things in facts if name == "in" and things[1] in shut}
        assert not any(f"{thing} in it" in text for thing in hidden)


def test_impossible_commands_are_invalid_and_change_nothing(env: TextWorld) -> None:
    env.reset(seed=0)
    before = env.state_key()
    for text in [
        *hostile_answers(np.random.default_rng(0), 1000),
        "look",
        "fly",
        "restart",
        "quit",
    ]:
        _, reward, over, _, info = env.step(text)
        assert (reward, over, info["action_is_valid"], info["action_is_effective"]) == (
            0.0,
            False,
            False,
            False,
        )
    assert env.state_key() == before
    command = env.optimal_action(np.random.default_rng(0))
    assert env.step(f"  {command.upper()} ")[4]["action_is_valid"]
