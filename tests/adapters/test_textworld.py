"""Generated games of TextWorld: the solution wins, seeds repeat, only possible commands count."""

from __future__ import annotations

import numpy as np
import pytest
from support.episodes.hostile import hostile_answers
from support.episodes.players import steps

from envs.adapters.textworld import TextWorld

pytestmark = pytest.mark.environments


@pytest.fixture(scope="module")
def env() -> TextWorld:
    return TextWorld(games=6)


def test_solution_wins_and_seeds_repeat(env: TextWorld) -> None:
    other, keys, random_wins = TextWorld(games=6), set(), 0
    for seed in range(12):
        solved = steps(env, seed=seed, noise=0.0, limit=8)
        keys.add(solved[0].state_key)
        assert solved[-1].info["success"] and solved[-1].reward == 1.0
        first, second = (steps(one, seed=seed, noise=0.6, limit=8) for one in (env, other))
        assert first == second
        random_wins += steps(env, seed=seed, noise=1.0, limit=8)[-1].info["success"]
    assert len(keys) >= 4 and random_wins <= 8
    assert TextWorld(games=6, first_game=6).reset(seed=0)[0] != env.reset(seed=0)[0]


def test_observation_tells_the_task_and_hides_what_is_closed(env: TextWorld) -> None:
    for seed in range(12):
        text = str(env.reset(seed=seed)[0])
        names = [line.partition(":")[0] for line in text.splitlines()]
        assert names == ["task", "room", "here", "carried", "exits", "commands"]
        assert env.difficulty() in (1, 2)
        facts = env.facts()
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
