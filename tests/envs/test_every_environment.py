"""Properties of every registered environment: gymnasium's checker, determinism, the protocol."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

import envs
import visual_envs
from envs.policies import (
    NoisyPolicy,
    OptimalPolicy,
    RandomPolicy,
    ScriptedPolicy,
    random_action,
)
from visual_envs.frozen_lake import FrozenLakeVisual
from visual_envs.sokoban import SokobanVisual

IDS = envs.ENVIRONMENT_IDS + visual_envs.ENVIRONMENT_IDS
LIMIT = 10
# success of the optimal policy, how far the random one is below it, and the turns played
BY_CHANCE = {"ragen/FrozenLakeSlippery-v0": (0.5, 0.25, 60), "ragen/Blackjack-v0": (0.38, 0.08, 30)}


@pytest.fixture(params=IDS)
def env_id(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def env(env_id: str) -> Iterator[gymnasium.Env[Any, Any]]:
    made = gymnasium.make(env_id)
    yield made
    made.close()


def success(
    env: gymnasium.Env[Any, Any], policy: ScriptedPolicy, *, episodes: int, limit: int
) -> float:
    """Return the share of episodes in which the policy succeeds within `limit` actions."""
    rng = np.random.default_rng(0)
    wins = 0
    for seed in range(episodes):
        env.reset(seed=seed)
        for _ in range(limit):
            _, _, terminated, _, info = env.step(policy.act(env, rng))
            if terminated:
                wins += info["success"]
                break
    return wins / episodes


def _episodes(env: gymnasium.Env[Any, Any], count: int) -> int:
    """Return how many episodes to play: fewer where actions are texts, whose environments take longer."""
    return 60 if isinstance(env.action_space, spaces.Text) else count


def play(env: gymnasium.Env[Any, Any], *, seed: int) -> list[Any]:
    """Return the observations, rewards and infos of an episode with fixed actions."""
    environment = env.unwrapped
    observation, info = env.reset(seed=seed)
    outcomes = [observation, info, environment.state_key(), environment.difficulty()]
    rng = np.random.default_rng(seed)
    for _ in range(LIMIT):
        observation, reward, terminated, truncated, info = env.step(random_action(env, rng))
        outcomes += [observation, reward, terminated, truncated, info, environment.state_key()]
        if terminated:
            break
    return outcomes


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(np.array_equal(left, right))


def test_gymnasium_checker_passes_without_warning(env: gymnasium.Env[Any, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)


def test_seed_and_actions_determine_the_episode(env_id: str) -> None:
    fresh, used = gymnasium.make(env_id), gymnasium.make(env_id)
    for seed in range(20):
        play(used, seed=1000 + seed)
        first, second = play(fresh, seed=seed), play(used, seed=seed)
        assert len(first) == len(second)
        assert all(same(left, right) for left, right in zip(first, second, strict=True))


def test_pickled_environment_continues_identically(env: gymnasium.Env[Any, Any]) -> None:
    env.reset(seed=3)
    copy = pickle.loads(pickle.dumps(env.unwrapped))
    assert copy.state_key() == env.unwrapped.state_key()
    action = random_action(env, np.random.default_rng(0))
    left, right = env.unwrapped.step(action), copy.step(action)
    assert all(same(value, other) for value, other in zip(left, right, strict=True))


def test_different_seeds_give_different_initial_states(env: gymnasium.Env[Any, Any]) -> None:
    keys = set()
    for seed in range(40):
        env.reset(seed=seed)
        keys.add(env.unwrapped.state_key())
    assert len(keys) >= (4 if "Bandit" in env.spec.id else 30)


def test_observations_are_in_the_space_and_protocol_members_work(
    env: gymnasium.Env[Any, Any],
) -> None:
    environment, rng = env.unwrapped, np.random.default_rng(0)
    assert environment.instructions.endswith(".") and len(environment.instructions) > 80
    for seed in range(30):
        observation, _ = env.reset(seed=seed)
        assert environment.difficulty() >= 1
        names = environment.action_names
        assert len(set(names)) == len(names) == getattr(env.action_space, "n", 0)
        assert not any("|" in name or "<" in name for name in names)
        for _ in range(LIMIT):
            assert observation in env.observation_space
            assert 0 < len(environment.describe()) < 200 and "\n" not in environment.describe()
            before = environment.state_key()
            observation, _, terminated, _, info = env.step(random_action(env, rng))
            assert type(info["success"]) is bool and type(info["action_is_effective"]) is bool
            assert info["action_is_effective"] == (environment.state_key() != before)
            if terminated:
                break
        assert observation in env.observation_space


def test_step_after_the_end_and_invalid_action_raise(env: gymnasium.Env[Any, Any]) -> None:
    environment = env.unwrapped
    environment.reset(seed=0)
    with pytest.raises((TypeError, ValueError), match="found action 9"):
        environment.step(9)
    rng = np.random.default_rng(0)
    while not environment.step(environment.optimal_action(rng))[2]:
        pass
    with pytest.raises(RuntimeError, match="has ended"):
        environment.step("" if isinstance(env.action_space, spaces.Text) else 0)


def test_unknown_options_and_render_modes_raise(env_id: str) -> None:
    env = gymnasium.make(env_id).unwrapped
    with pytest.raises(ValueError, match="found \\['min_distanc'\\]"):
        env.reset(seed=0, options={"min_distanc": 3})
    with pytest.raises(ValueError, match="render_mode: found 'human'"):
        type(env)(render_mode="human")


def test_optimal_policy_succeeds_more_often_than_random(
    env: gymnasium.Env[Any, Any], env_id: str
) -> None:
    least, margin, limit = BY_CHANCE.get(env_id, (1.0, 0.25, 30))
    episodes = _episodes(env, 200)
    best = success(env, OptimalPolicy(), episodes=episodes, limit=limit)
    random = success(env, RandomPolicy(), episodes=episodes, limit=LIMIT)
    assert best >= least
    assert random < best - margin


def test_demonstrator_is_between_random_and_optimal(
    env: gymnasium.Env[Any, Any], env_id: str
) -> None:
    base = "blind" if hasattr(env.unwrapped, "blind_action") else "optimal"
    # the target number of 2048 takes 20 moves, and its player thinks for 2 ms
    episodes, limit = (60, 22) if "2048" in env_id else (_episodes(env, 300), LIMIT)
    random = success(env, RandomPolicy(), episodes=episodes, limit=limit)
    noisy = success(env, NoisyPolicy(noise=0.5, base=base), episodes=episodes, limit=limit)
    best = success(env, OptimalPolicy(), episodes=episodes, limit=limit)
    assert random < noisy < best


def test_blind_base_policy_without_blind_action_raises() -> None:
    env = gymnasium.make("ragen/Bandit-v0")
    env.reset(seed=0)
    with pytest.raises(TypeError, match='set base="optimal"'):
        NoisyPolicy(noise=0.0, base="blind").act(env, np.random.default_rng(0))
    with pytest.raises(ValueError, match="noise: found 2"):
        NoisyPolicy(noise=2)


@pytest.mark.parametrize("environment", [FrozenLakeVisual, SokobanVisual])
def test_a_scaled_image_has_larger_tiles(environment) -> None:
    plain, scaled = environment(), environment(image_scale=3)
    for env in (plain, scaled):
        env.reset(seed=5)
    small, large = (env.step(0)[0]["image"] for env in (plain, scaled))
    assert (
        scaled.observation_space["image"].shape
        == large.shape
        == (*[3 * s for s in small.shape[:2]], 3)
    )
    assert np.array_equal(large[1::3, 2::3], small)
    assert np.array_equal(large[::3, ::3], small)
    with pytest.raises(ValueError, match="image_scale"):
        environment(image_scale=0)
