"""Episodes of scripted players, and the start of an episode of a kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import gymnasium
import numpy as np

from envs.policies import NoisyPolicy
from envs.tools import ToolEnvironment

Tools = TypeVar("Tools", bound=ToolEnvironment)


class Played(NamedTuple):
    """Sum of an episode's rewards, its success, and the sums of the reward's parts."""

    reward: float
    success: bool
    parts: dict[str, float]


class Step(NamedTuple):
    """The values of a step, and the state after it."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    state_key: str
    description: str


def play(env: Tools, choose: Callable[[Tools], str], *, limit: int = 40) -> Played:
    """Play an episode that has begun."""
    total, parts = 0.0, Counter()
    for _ in range(limit):
        _, reward, over, _, info = env.step(choose(env))
        total += reward
        parts.update(info["reward_parts"])
        if over:
            return Played(total, info["success"], dict(parts))
    return Played(total, False, dict(parts))


def steps(env: gymnasium.Env[Any, Any], *, seed: int, noise: float, limit: int = 40) -> list[Step]:
    """Return an episode of the optimal policy that errs with a probability, the state after the reset first."""
    policy, rng = NoisyPolicy(noise=noise, base="optimal"), np.random.default_rng(seed)
    observation, info = env.reset(seed=seed)
    played = [Step(observation, 0.0, False, False, info, env.state_key(), env.describe())]
    while len(played) <= limit and not (played[-1].terminated or played[-1].truncated):
        outcome = env.step(policy.act(env, rng))
        played.append(Step(*outcome, env.state_key(), env.describe()))
    return played


def begin(env: Tools, wanted: Callable[[Tools], bool]) -> Tools:
    """Return the environment at the start of the first episode of a kind."""
    for seed in range(1000):
        env.reset(seed=seed)
        if wanted(env):
            return env
    raise AssertionError("no such episode")
