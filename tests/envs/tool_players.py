"""Players of environments with tools, and episodes of a kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from envs.tools import ToolEnvironment

Tools = TypeVar("Tools", bound=ToolEnvironment)


def play(env: Tools, choose: Callable[[Tools], str], *, limit: int) -> tuple[float, bool]:
    """Return the sum of the rewards and the success of an episode that has begun."""
    total = 0.0
    for _ in range(limit):
        _, reward, over, _, info = env.step(choose(env))
        total += reward
        if over:
            return total, info["success"]
    return total, False


def begin(env: Tools, wanted: Callable[[Tools], bool]) -> Tools:
    """Return the environment at the start of the first episode of a kind."""
    for seed in range(1000):
        env.reset(seed=seed)
        if wanted(env):
            return env
    raise AssertionError("no such episode")
