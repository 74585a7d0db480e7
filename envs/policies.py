"""Scripted policies: random, optimal, and a noisy demonstrator.

A policy chooses an action with the help of the environment (`optimal_action`, `blind_action`). It keeps no
state, and one policy object serves many environments.
"""

from __future__ import annotations

import copy
from enum import StrEnum
from typing import Any, Protocol

import gymnasium
import numpy as np

from .base import Count, Probability, checked_arguments

SEPARATOR = "||"
"""Text between the actions of a response."""


class ScriptedPolicy(Protocol):
    """Policy that chooses actions by rule."""

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int | str:
        """Return an action for the current state of `env`: the index of a named one, or free text.

        An empty text makes a response without a valid action.
        """
        ...


class BasePolicy(StrEnum):
    """Policy that `NoisyPolicy` follows when it does not act at random."""

    OPTIMAL = "optimal"
    BLIND = "blind"


class RandomPolicy:
    """Uniform policy."""

    needs_trust = ()

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int | str:
        """Return an action drawn uniformly, of free texts one that the environment draws."""
        return random_action(env, rng)


class OptimalPolicy:
    """Optimal policy, given by the environment's `optimal_action`."""

    needs_trust = ()

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int | str:
        """Return an optimal action. `rng` breaks ties."""
        return _optimal_action(env, rng)


class PlayerPolicy:
    """Scripted player of a game of two, in the place of the policy.

    Args:
        name: Its name as an opponent, such as `fair`.
    """

    needs_trust = ()

    def __init__(self, *, name: str) -> None:
        self.name = name

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int | str:
        """Return its action for the seat that is to move.

        Raises:
            ValueError: The game has no such player.
        """
        players = _environment(env).players
        if self.name not in players:
            raise ValueError(f"name: found {self.name!r}, expected one of {', '.join(players)}")
        action: int | str = players[self.name](rng)
        return action


class NoisyPolicy:
    """Demonstrator that acts at random with probability `noise` and follows a base policy otherwise.

    Args:
        noise: Probability of a uniform action.
        base: Base policy: "optimal", or "blind" if the environment has a `blind_action`.
    """

    needs_trust = ()

    @checked_arguments
    def __init__(self, *, noise: Probability = 0.85, base: BasePolicy = BasePolicy.BLIND) -> None:
        self.noise = noise
        self.base = base

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int | str:
        """Return a uniform action or an action of the base policy."""
        environment = _environment(env)
        if rng.random() < self.noise:
            return random_action(env, rng)
        if self.base is BasePolicy.OPTIMAL:
            return _optimal_action(env, rng)
        if not hasattr(environment, "blind_action"):
            raise TypeError(
                f'base: found "blind", but {type(environment).__name__} has no blind_action; '
                'set base="optimal"'
            )
        action: int | str = environment.blind_action(rng)
        return action


class SeveralActions:
    """Demonstrator that writes the next few actions of another policy in one response.

    It draws their number uniformly and foresees the states between them on a copy of the environment, with chance
    drawn anew. Actions have names.

    Args:
        policy: The other policy.
        most: Largest number of actions in a response, such as `env.max_actions_per_turn`.
    """

    needs_trust = ()

    @checked_arguments
    def __init__(self, *, policy: Any, most: Count) -> None:
        self.policy: ScriptedPolicy = policy
        self.most = most

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> str:
        """Return the names of the next actions, those up to the end of the episode if there are fewer."""
        copied = copied_environment(env, rng)
        names = copied.action_names
        chosen: list[str] = []
        for _ in range(rng.integers(1, self.most + 1)):
            action = int(self.policy.act(copied, rng))
            chosen.append(names[action])
            _, _, terminated, truncated, _ = copied.step(action)
            if terminated or truncated:
                break
        return f" {SEPARATOR} ".join(chosen)


def copied_environment(env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> Any:
    """Return a copy of an environment without its wrappers, whose random events are drawn from `rng`."""
    environment = _environment(env)
    spaces = (environment.action_space, environment.observation_space)
    copied = copy.deepcopy(environment, {id(space): space for space in spaces})
    copied.np_random = rng
    return copied


def random_action(env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int | str:
    """Return the environment's `random_action`, or any of its named actions where it has none.

    Raises:
        TypeError: Actions are free text, and the environment has no `random_action`.
    """
    environment = _environment(env)
    if hasattr(environment, "random_action"):
        action: int | str = environment.random_action(rng)
        return action
    if not hasattr(environment, "action_names"):
        raise TypeError(
            f"{type(environment).__name__}: its actions are free text and it has no random_action(rng); write one"
        )
    return int(rng.integers(len(environment.action_names)))


def _optimal_action(env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int | str:
    action: int | str = _environment(env).optimal_action(rng)
    return action


def _environment(env: gymnasium.Env[Any, Any]) -> Any:
    # These members are not part of gymnasium's interface.
    return env.unwrapped
