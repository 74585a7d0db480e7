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


class Player(Protocol):
    """What chooses actions in a world."""

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int:
        """Return the index of an action for the present state of `env`."""
        ...


class PlayerBase(StrEnum):
    """What a noisy player does when it does not act at random."""

    OPTIMAL = "optimal"
    BLIND = "blind"


class RandomPlayer:
    """Every action with the same probability."""

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int:
        """Return a uniform action."""
        return int(rng.integers(len(_world(env).action_names)))


class OptimalPlayer:
    """A best action, as the world itself knows it."""

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int:
        """Return a best action; `rng` breaks ties."""
        return int(_world(env).optimal_action(rng))


class NoisyPlayer:
    """A demonstrator that mostly wanders, and otherwise plays well or plays blind to dangers.

    Args:
        noise: probability of a uniform action.
        base: what it does else: "optimal", or "blind" where the world has a `blind_action`.
    """

    def __init__(self, *, noise: float = 0.85, base: str = "blind") -> None:
        check_number(noise, name="noise", low=0.0, high=1.0)
        check_choice(base, name="base", choices=list(PlayerBase))
        self.noise = noise
        self.base = PlayerBase(base)

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int:
        """Return a uniform or a base action."""
        world = _world(env)
        if rng.random() < self.noise:
            return int(rng.integers(len(world.action_names)))
        if self.base is PlayerBase.OPTIMAL:
            return int(world.optimal_action(rng))
        if not hasattr(world, "blind_action"):
            raise TypeError(
                f'base: found "blind", but {type(world).__name__} has no blind_action; '
                'set base="optimal"'
            )
        return int(world.blind_action(rng))


def _world(env: gymnasium.Env[Any, Any]) -> Any:
    # The worlds' own members are no part of gymnasium's interface.
    return env.unwrapped
