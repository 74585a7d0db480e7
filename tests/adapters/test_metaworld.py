"""The robot arm of Meta-World, controlled by named actions."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from visual_envs.adapters.metaworld import MetaWorld

pytestmark = pytest.mark.environments
LIMIT = 36


@pytest.fixture(scope="module")
def shared():
    env = MetaWorld()
    yield env
    env.close()


@pytest.fixture
def env(shared):
    shared.tasks = tuple(shared.environments)
    return shared


def test_the_scripted_player_solves_every_task(env):
    for task in env.tasks:
        env.tasks = (task,)
        for seed in range(8):
            observation, _ = env.reset(seed=seed)
            for _ in range(LIMIT):
                assert observation in env.observation_space
                assert len(env.describe()) < 200
                action = env.optimal_action(np.random.default_rng(0))
                observation, reward, terminated, _, info = env.step(action)
                if terminated:
                    break
                assert reward == 0
            assert info["success"] and reward == 1, f"{task} {seed}"
        with pytest.raises(RuntimeError, match="has ended"):
            env.step(0)


def test_random_and_repeated_moves_solve_little(env):
    rng, wins = np.random.default_rng(7), 0
    for seed in range(16):
        env.reset(seed=seed)
        fixed = int(rng.integers(6))
        for _ in range(12):
            terminated = env.step(fixed if seed % 2 else env.random_action(rng))[2]
            if terminated:
                wins += 1
                break
    assert wins <= 3


def test_every_seed_begins_a_task(env):
    """The library never returns from a reset with a thing too near its goal."""
    env.tasks = ("reach",)
    for seed in range(60):
        env.reset(seed=seed)
        thing, goal = env.environment.obj_init_pos, env.environment._target_pos
        assert np.linalg.norm(thing[:2] - goal[:2]) >= 0.15


def test_seeds_repeat_with_their_pictures(env):
    keys = set()
    for seed in range(6):
        episodes = []
        for _ in range(2):
            rng = np.random.default_rng(seed + 100)
            shown = [env.reset(seed=seed)[0]]
            keys.add(env.state_key())
            shown += [env.step(env.random_action(rng))[0] for _ in range(3)]
            episodes.append(shown)
        for one, other in zip(*episodes, strict=True):
            assert one["text"] == other["text"]
            assert np.array_equal(one["image"], other["image"])
        assert episodes[0][0]["image"].std() > 10
    assert len(keys) == 6


def test_moves_move_the_hand_as_named(env):
    env.tasks = ("reach",)
    moves = {"Right": (0, 1), "Left": (0, -1), "Forward": (1, 1), "Back": (1, -1), "Up": (2, 1)}
    for name, (axis, sign) in moves.items():
        env.reset(seed=0)
        before = env.hand()
        info = env.step(env.action_names.index(name))[4]
        moved = env.hand() - before
        assert info["action_is_effective"] and int(np.argmax(np.abs(moved))) == axis
        assert 0.01 < sign * moved[axis] < 0.12


def test_a_second_environment_and_a_second_thread_draw_the_same(env):
    first = env.reset(seed=3)[0]["image"]
    other = MetaWorld(tasks=["reach"])
    assert other.reset(seed=3)[0]["image"].std() > 10
    drawn = []
    thread = threading.Thread(target=lambda: drawn.append(env.reset(seed=3)[0]["image"]))
    thread.start()
    thread.join()
    assert np.array_equal(drawn[0], first)
    other.close()


def test_unknown_task_is_refused():
    with pytest.raises(ValueError, match=r"tasks: found \['fly'\]"):
        MetaWorld(tasks=["fly"])


def test_an_episode_has_no_limit_of_the_librarys_own(env):
    env.reset(seed=0)
    for _ in range(50):
        env.step(env.action_names.index("Close"))
    assert env.step(env.action_names.index("Up"))[4]["action_is_effective"]
