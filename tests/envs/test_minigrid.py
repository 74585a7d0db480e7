"""Tasks of MiniGrid and BabyAI: what the agent sees, the bot, seeds, images."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from support.episodes.players import steps

from envs.adapters.minigrid import MiniGrid
from visual_envs.adapters.minigrid import MiniGridVisual

MOVES = ("Left", "Right", "Forward")


@pytest.mark.parametrize(
    "id",
    ["BabyAI-GoToLocalS5N2-v0", "BabyAI-GoToLocal-v0", "BabyAI-PickupLoc-v0", "BabyAI-OpenDoor-v0"],
)
def test_bot_succeeds_and_seeds_repeat(id: str) -> None:
    env, other, wins, keys = MiniGrid(id=id), MiniGrid(id=id), [], set()
    for seed in range(5):
        played = steps(env, seed=seed, noise=0.0)
        keys.add(played[0].state_key)
        wins.append(played[-1].info["success"])
        for before, after in pairwise(played):
            changed = after.state_key != before.state_key
            assert after.info["action_is_effective"] == changed
        assert env.difficulty() >= 1
        assert steps(other, seed=seed, noise=0.5) == steps(other, seed=seed, noise=0.5)
    assert all(wins) and len(keys) == 5


def test_done_is_effective() -> None:
    env = MiniGrid(id="MiniGrid-GoToDoor-5x5-v0", actions=("Left", "Done"))
    env.reset(seed=0)
    key = env.state_key()
    _, _, over, _, info = env.step(1)
    assert over and env.state_key() == key and info["action_is_effective"]


def test_random_player_and_standing_still_earn_less_than_the_bot() -> None:
    env = MiniGrid(actions=MOVES)
    rewards = {0.0: [], 1.0: []}
    for seed in range(40):
        for noise, found in rewards.items():
            found.append(steps(env, seed=seed, noise=noise)[-1].reward)
    assert np.mean(rewards[0.0]) > 0.8 and np.mean(rewards[1.0]) < 0.5
    env.reset(seed=0)
    assert all(env.step(0)[1] == 0 for _ in range(12))


def test_words_agree_with_the_state() -> None:
    env = MiniGrid(id="MiniGrid-Empty-5x5-v0", actions=MOVES)
    assert (
        env.reset(seed=0)[0] == "get to the green goal square: green goal 2 ahead 2 right, free 2"
    )
    assert env.step(2)[0].endswith(": green goal 1 ahead 2 right, free 1")
    assert env.step(2)[0].endswith(": green goal 2 right, free 0")
    assert env.step(1)[0].endswith(": green goal 2 ahead, free 2")
    env.step(2)
    _, reward, terminated, _, info = env.step(2)
    assert terminated and info["success"] and reward > 0.9
    with pytest.raises(RuntimeError, match="has ended"):
        env.step(2)


def test_what_is_carried_is_named() -> None:
    env = MiniGrid(id="BabyAI-PickupLoc-v0")
    env.reset(seed=1)
    env.environment.carrying = next(
        thing for thing in env.environment.grid.grid if thing and thing.type == "ball"
    )
    assert env.describe().endswith(f"carrying {env.environment.carrying.color} ball")


def test_tasks_without_a_bot_and_actions_that_it_lacks_say_so() -> None:
    rng = np.random.default_rng(0)
    plain, short = MiniGrid(id="MiniGrid-Empty-5x5-v0"), MiniGrid(actions=["Forward"])
    plain.reset(seed=0)
    with pytest.raises(NotImplementedError, match="only tasks of BabyAI"):
        plain.optimal_action(rng)
    short.reset(seed=0)
    with pytest.raises(NotImplementedError, match="actions: lacks Right"):
        short.optimal_action(rng)
    with pytest.raises(ValueError, match="id: found 'BabyAI-Gone', expected one of BabyAI-"):
        MiniGrid(id="BabyAI-Gone")
    with pytest.raises(ValueError, match="actions: found"):
        MiniGrid(actions=["Left", "Left"])


@pytest.mark.parametrize(("view", "side"), [("agent", 7 * 16), ("map", 5 * 16)])
def test_image_shows_the_grid(view: str, side: int) -> None:
    env = MiniGridVisual(actions=MOVES, view=view)
    seen = []
    for seed in range(5):
        observation, _ = env.reset(seed=seed)
        assert observation in env.observation_space
        assert observation["image"].shape == (side, side, 3)
        assert observation["text"].startswith("go to the ")
        turned = env.step(0)[0]["image"]
        assert not np.array_equal(turned, observation["image"])
        seen.append(observation["image"].tobytes())
    assert len(set(seen)) == 5
    again, _ = env.reset(seed=4)
    assert again["image"].tobytes() == seen[-1]


def test_generator_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    env = MiniGrid(id="BabyAI-PickupLoc-v0")
    for seed in range(30):
        env.reset(seed=seed)
    assert capsys.readouterr().out == ""


def test_a_plan_is_the_place_of_the_missions_thing_in_view() -> None:
    task = "BabyAI-GoToLocalS8N4-v0"
    env, plain = MiniGrid(id=task, plans=True), MiniGrid(id=task)
    plans_seen = 0
    for seed in range(30):
        text, _ = env.reset(seed=seed)
        plain.reset(seed=seed)
        assert plain.plan() is None
        mission, things = text.split(": ")
        thing = mission.split(maxsplit=3)[3]
        seen = [one for one in things.split(", ") if one.startswith(thing)]
        assert env.plan() == (seen[0] if seen else None)
        plans_seen += bool(seen)
    assert 5 < plans_seen < 30
