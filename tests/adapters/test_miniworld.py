"""First-person rooms of MiniWorld."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ragen_pl.environments.process import ProcessEnvironment
from visual_envs.adapters.miniworld import MiniWorld, Room

pytestmark = pytest.mark.environments
SIZES = {Room.ONE_ROOM: 6, Room.HALLWAY: 12}


@pytest.fixture(scope="module", params=list(Room))
def env(request):
    env = MiniWorld(room=request.param, size=SIZES[request.param])
    yield env
    env.close()


def test_the_scripted_player_reaches_the_box(env):
    for seed in range(40):
        observation, _ = env.reset(seed=seed)
        assert 1 <= env.difficulty() < 30
        for _ in range(30):
            assert observation in env.observation_space
            assert len(env.describe()) < 30
            observation, reward, terminated, _, info = env.step(
                env.optimal_action(np.random.default_rng(0))
            )
            if terminated:
                break
            assert reward == 0 and info["action_is_effective"]
        assert info["success"] and reward == 1
        with pytest.raises(RuntimeError, match="has ended"):
            env.step(0)


def test_walking_ahead_and_turning_on_the_spot_seldom_succeed(env):
    wins = {0: 0, 2: 0}
    for action in wins:
        for seed in range(40):
            env.reset(seed=seed)
            for _ in range(12):
                terminated = env.step(action)[2]
                if terminated:
                    wins[action] += 1
                    break
    assert wins[0] == 0 and wins[2] <= 16


def test_seeds_repeat_and_pictures_follow(env):
    keys = set()
    for seed in range(10):
        pictures = []
        for _ in range(2):
            rng = np.random.default_rng(seed + 100)
            shown = [env.reset(seed=seed)[0]["image"].copy()]
            keys.add(env.state_key())
            for _ in range(3):
                observation, _, terminated, _, _ = env.step(env.random_action(rng))
                shown.append(observation["image"].copy())
                if terminated:
                    break
            pictures.append(np.stack(shown))
        assert np.array_equal(*pictures)
        assert pictures[0].std() > 0 and not np.array_equal(pictures[0][0], pictures[0][1])
    assert len(keys) == 10


def test_a_second_environment_or_thread_is_refused(env):
    with pytest.raises(RuntimeError, match=r"set env\.process=true"):
        MiniWorld()
    errors = []

    def reset():
        try:
            env.reset(seed=0)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=reset)
    thread.start()
    thread.join()
    assert "set env.process=true" in errors[0]


def test_processes_draw_what_one_draws(env):
    if type(env.environment).__name__ != "OneRoom":
        pytest.skip("compared in one room")
    others = [
        ProcessEnvironment("visual_envs.adapters.miniworld.MiniWorld", {"size": size})
        for size in (6, 8)
    ]
    try:
        for other in others:
            other.reset(seed=9)
        shown = others[0].reset(seed=3)[0]["image"]
        assert np.array_equal(shown, env.reset(seed=3)[0]["image"])
    finally:
        for other in others:
            other.close()


def test_settings_are_checked():
    with pytest.raises(ValueError, match="room: found 'maze'"):
        MiniWorld(room="maze")
