"""Scripted players: the ceiling, the floor, and the imperfect demonstrator between them.

A player chooses one action from the world's own offers (`optimal_action`, `blind_action`); it keeps
no state, so that one player serves many environments.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Protocol

import gymnasium
import numpy as np

from envs.base import check_choice, check_number


class ScriptedPolicy(Protocol):
    """What chooses actions in an environment."""

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int:
        """Return the index of an action for the present state of `env`."""
        ...


class PlayerBase(StrEnum):
    """What a noisy player does when it does not act at random."""

    OPTIMAL = "optimal"
    BLIND = "blind"


class RandomPolicy:
    """Every action with the same probability."""

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int:
        """Return a uniform action."""
        return int(rng.integers(len(_environment(env).action_names)))


class OptimalPolicy:
    """A best action, as the environment itself knows it."""

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int:
        """Return a best action; `rng` breaks ties."""
        return int(_environment(env).optimal_action(rng))


class NoisyPolicy:
    """A demonstrator that mostly wanders, and otherwise plays well or plays blind to dangers.

    Args:
        noise: probability of a uniform action.
        base: what it does else: "optimal", or "blind" where the environment has a `blind_action`.
    """

    def __init__(self, *, noise: float = 0.85, base: str = "blind") -> None:
        check_number(noise, name="noise", low=0.0, high=1.0)
        check_choice(base, name="base", choices=list(PlayerBase))
        self.noise = noise
        self.base = PlayerBase(base)

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int:
        """Return a uniform or a base action."""
        environment = _environment(env)
        if rng.random() < self.noise:
            return int(rng.integers(len(environment.action_names)))
        if self.base is PlayerBase.OPTIMAL:
            return int(environment.optimal_action(rng))
        if not hasattr(environment, "blind_action"):
            raise TypeError(
                f'base: found "blind", but {type(environment).__name__} has no blind_action; '
                'set base="optimal"'
            )
        return int(environment.blind_action(rng))


def _environment(env: gymnasium.Env[Any, Any]) -> Any:
    # The environments' own members are no part of gymnasium's interface.
    return env.unwrapped
