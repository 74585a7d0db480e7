"""Gymnasium's own environments in words and in pictures: names, success, optimal players, seeds."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from support.episodes.players import steps

from envs.adapters.gym import Gym
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.prompts.parsing import ParsedResponse
from visual_envs.adapters.gym import GymVisual


@pytest.mark.parametrize(
    ("id", "settings", "share"),
    [
        ("FrozenLake-v1", {"is_slippery": False}, 1.0),
        ("FrozenLake8x8-v1", {}, 0.5),
        ("Taxi-v4", {}, 1.0),
        ("CliffWalking-v1", {}, 1.0),
        ("Blackjack-v1", {}, 0.3),
        ("CartPole-v1", {}, 1.0),
        ("MountainCar-v0", {}, 1.0),
    ],
)
def test_player_succeeds_more_often_than_chance_and_seeds_repeat(
    id: str, settings: dict[str, Any], share: float
) -> None:
    env, other = Gym(id=id, settings=settings), Gym(id=id, settings=settings)
    wins = {
        noise: [
            steps(env, seed=seed, noise=noise, limit=500)[-1].info["success"] for seed in range(15)
        ]
        for noise in (0.0, 1.0)
    }
    assert np.mean(wins[0.0]) >= share and np.mean(wins[1.0]) < share - 0.05
    for seed in range(3):
        first, second = (steps(one, seed=seed, noise=0.5, limit=30) for one in (env, other))
        assert first == second
    assert all("\x1b" not in str(step.observation) + step.description for step in first)


def test_blackjack_player_loses_little() -> None:
    env, rng, total = Gym(id="Blackjack-v1"), np.random.default_rng(0), 0.0
    for seed in range(2000):
        env.reset(seed=seed)
        over = False
        while not over:
            _, reward, over, _, _ = env.step(env.optimal_action(rng))
        total += reward
    # basic strategy without doubling and splitting loses about 0.05 a game, sticking at once 0.15
    assert total / 2000 == pytest.approx(-0.05, abs=0.06)


class ManyNumbers(gymnasium.Env[Any, int]):
    """Shows a hundred numbers."""

    observation_space = spaces.Box(0, 1, (100,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.arange(100) / 100, {}


def test_all_numbers_of_an_observation_are_shown() -> None:
    gymnasium.register("ManyNumbers-v0", entry_point=ManyNumbers)
    env = Gym(id="ManyNumbers-v0", actions=["A", "B"])
    shown, _ = env.reset(seed=0)
    assert shown == ", ".join(f"{number / 100:.2f}" for number in range(100))
    assert len(env.describe()) == 200
    del gymnasium.registry["ManyNumbers-v0"]


def test_an_action_that_ends_the_game_is_effective() -> None:
    env = Gym(id="Blackjack-v1")
    seen, _ = env.reset(seed=0)
    after, _, over, _, info = env.step(env.action_names.index("Stick"))
    assert over and after == seen and info["action_is_effective"]


def test_coloured_cells_get_brackets() -> None:
    lake = Gym(id="FrozenLake-v1", settings={"is_slippery": False})
    assert lake.reset(seed=0)[0] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    text, reward, over, _, info = lake.step(1)
    assert (text, reward, over) == ("  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG", 0.0, False)
    assert info == {"success": False, "action_is_effective": True}
    assert not lake.step(0)[4]["action_is_effective"]
    taxi = Gym(id="Taxi-v4")
    town = str(taxi.reset(seed=0)[0])
    assert "(" in town and "/" in town and "[" in town and "{" not in town
    rng = np.random.default_rng(0)
    while taxi.action_names[action := taxi.optimal_action(rng)] != "Pickup":
        taxi.step(action)
    assert "{" in taxi.step(action)[0]


def test_known_names_and_names_by_key() -> None:
    assert Gym(id="Taxi-v4").action_names == ("South", "North", "East", "West", "Pickup", "Dropoff")
    named = Gym(id="CartPole-v1", actions=["A", "B"], success="terminated", rules="Choose.")
    assert named.action_names == ("A", "B") and named.instructions == "Choose."
    named.reset(seed=0)
    while not (outcome := named.step(0))[2]:
        pass
    assert outcome[4]["success"]
    with pytest.raises(RuntimeError, match="has ended"):
        named.step(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"id": "Taxi-v3000"}, "id=Taxi-v3000: "),
        ({"id": "Pendulum-v1"}, r"found actions Box\("),
        ({"id": "CartPole-v1", "actions": ["Left"]}, "expected names of the 2 actions"),
        (
            {"id": "CliffWalking-v1", "success": "threshold"},
            "success=threshold: the id has no reward_threshold",
        ),
        (
            {"id": "CartPole-v1", "success": "won"},
            "success: found 'won', expected one of terminated",
        ),
        ({"id": "no_such_module:Walk-v0"}, "id=no_such_module:Walk-v0: No module named"),
        ({"id": "gymnasium:Walk-v0"}, "id=gymnasium:Walk-v0: Environment `Walk` doesn't exist"),
        (
            {"id": "CartPole-v1", "settings": {"is_slippery": False}},
            r"settings of id=CartPole-v1: .*'~env.kwargs.settings.is_slippery' removes it",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gym(**arguments)


def test_an_id_may_name_the_module_that_registers_it(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_walks.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.toy_text import CliffWalkingEnv\n"
        "gymnasium.register('walks/Cliff-v0', entry_point=CliffWalkingEnv, max_episode_steps=9)\n"
        "gymnasium.register('Walk-v0', entry_point=CliffWalkingEnv)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for id, count in (("my_walks:walks/Cliff-v0", 9), ("my_walks:Walk-v0", 12)):
        game = Gym(id=id, actions=["Up", "Right", "Down", "Left"])
        assert game.reset(seed=0)[0].count("\n") == 3
        ended = [any(game.step(0)[2:4]) for _ in range(9)]
        assert ended == [False] * 8 + [count == 9]
    with pytest.raises(ValueError, match=r"settings of id=Taxi-v4: .*'~env.kwargs.settings.depth'"):
        GymVisual(id="Taxi-v4", settings={"depth": 1})


@pytest.mark.parametrize("id", ["CliffWalking-v1", "Taxi-v4", "CartPole-v1"])
def test_pictures_change_with_the_game_and_repeat(id: str) -> None:
    env, other = GymVisual(id=id, width=64), GymVisual(id=id, width=64)
    first, _ = env.reset(seed=1)
    assert first in env.observation_space and first["image"].shape == (96, 64, 3)
    assert np.array_equal(first["image"], other.reset(seed=1)[0]["image"])
    rng = np.random.default_rng(0)
    images = [env.step(env.optimal_action(rng))[0]["image"] for _ in range(4)]
    assert any(not np.array_equal(image, first["image"]) for image in images)
    env.close()


def test_rules_describe_what_is_shown() -> None:
    text, picture = Gym(id="FrozenLake-v1"), GymVisual(id="FrozenLake-v1")
    assert "H a hole" in text.instructions and "Brackets mark your cell" in text.instructions
    assert "Brackets" not in picture.instructions and "picture of the game" in picture.instructions
    assert "over a frozen lake" in picture.instructions


@pytest.mark.parametrize(
    ("id", "penalty"),
    [
        ("Taxi-v4", 10.0),
        ("CliffWalking-v1", 100.0),
        ("FrozenLake-v1", 0.05),
        ("CartPole-v1", 0.05),
        ("MountainCar-v0", 1.0),
        ("Acrobot-v1", 1.0),
    ],
)
def test_an_invalid_response_costs_as_much_as_the_worst_action(id, penalty):
    manager = EnvironmentManager(
        target="envs.adapters.gym.Gym", kwargs={"id": id}, format_penalty="auto", invalid_ends=False
    )
    (slot,) = manager.open([EpisodeSpec(group=0, member=0, seed=0)])
    (result,) = manager.step([slot], [ParsedResponse()])
    assert result.reward_terms == {"format": -penalty}
    assert manager.penalty(slot.members) == penalty
    fixed = EnvironmentManager(target="envs.adapters.gym.Gym", format_penalty=0.5)
    assert fixed.penalty(slot.members) == 0.5
