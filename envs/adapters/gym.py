"""Any gymnasium environment with discrete actions, shown in words: its text rendering or its observation."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import Error

from ..base import Environment, Observation, checked_arguments

_ESCAPE = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0m", re.DOTALL)
_RESET = "\x1b[0m"
# Rendered text marks cells by colour; brackets take its place.
_BRACKETS = {"41": "[]", "43": "[]", "42": "{}", "34;1": "()", "35": "//"}
_DISCOUNT = 0.999
_ROUNDS = 2000
_PRECISION = 1e-9
# of a description, which demonstrations repeat
_MAX_DESCRIPTION = 200
# of a response without a valid action, where the game itself has no costs
_LEAST_PENALTY = 0.05


class Success(StrEnum):
    """When an episode counts as solved.

    - `terminated`: it ends by itself
    - `positive`: it ends by itself, and the last reward is above 0
    - `threshold`: its return reaches the id's `reward_threshold`
    """

    TERMINATED = "terminated"
    POSITIVE = "positive"
    THRESHOLD = "threshold"


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts about the ids of a family.

    Attributes:
        actions: Names of the actions.
        success: When an episode is solved.
        rules: Rules in full sentences.
        rendering: How the text rendering shows the game, in full sentences.
        fields: Names of the numbers of an observation.
        policy: A good action for an observation.
        step_cost: Cost of each step, of an id without a table of transitions.
    """

    actions: tuple[str, ...]
    success: Success
    rules: str
    rendering: str = ""
    fields: tuple[str, ...] = ()
    policy: Callable[[Any], int] | None = None
    step_cost: float = 0.0


def _blackjack(hand: Any) -> int:
    """Hit by basic strategy, without doubling and splitting."""
    total, dealer, ace = (int(number) for number in hand)
    if ace:
        return int(total < 18 or (total == 18 and dealer in (9, 10)))
    lowest = 17 if dealer in (1, 7, 8, 9, 10) else 12 if dealer in (4, 5, 6) else 13
    return int(total < lowest)


FAMILIES = {
    "FrozenLake": Family(
        actions=("Left", "Down", "Right", "Up"),
        success=Success.POSITIVE,
        rules="You walk over a frozen lake to the goal. A hole ends the walk. The ice may be slippery.",
        rendering="S is the start, G the goal, F ice and H a hole. Brackets mark your cell.",
    ),
    "CliffWalking": Family(
        actions=("Up", "Right", "Down", "Left"),
        success=Success.TERMINATED,
        rules=(
            "You walk along a cliff to the goal. Who steps over the cliff loses 100 and is put back at the start. Each "
            "step costs 1."
        ),
        rendering="x is you, T is the goal, and C is the cliff.",
    ),
    "Taxi": Family(
        actions=("South", "North", "East", "West", "Pickup", "Dropoff"),
        success=Success.POSITIVE,
        rules=(
            "You drive a taxi through a town with four stops. You cannot drive through walls. Go to the passenger, "
            "Pickup, go to the destination, and Dropoff. Each step costs 1, a wrong Pickup or Dropoff 10."
        ),
        rendering=(
            "The stops are R, G, Y and B. The stop in round brackets is where the passenger waits, the one between "
            "slashes is the destination. Square brackets mark the taxi, curly ones a taxi with its passenger. Walls "
            "are |."
        ),
    ),
    "Blackjack": Family(
        actions=("Stick", "Hit"),
        success=Success.POSITIVE,
        rules=(
            "You play blackjack against a dealer, who shows one card and draws below 17. Hit draws a card, and "
            "you lose above 21. Stick ends your turn. The higher sum wins. An ace counts 11 where that does not "
            "pass 21, and is then called usable; the dealer's ace is shown as 1."
        ),
        fields=("sum", "dealer", "usable ace"),
        policy=_blackjack,
    ),
    "CartPole": Family(
        actions=("Left", "Right"),
        success=Success.THRESHOLD,
        rules="You push a cart to the left or to the right and keep the pole on it upright.",
        fields=("cart", "cart speed", "pole angle", "pole speed"),
        policy=lambda seen: int(seen[2] + 0.5 * seen[3] + 0.01 * seen[0] + 0.05 * seen[1] > 0),
    ),
    "MountainCar": Family(
        actions=("Left", "Rest", "Right"),
        success=Success.TERMINATED,
        rules="You drive a weak car out of a valley. Swing to and fro to reach the flag on the right hill.",
        fields=("place", "speed"),
        policy=lambda seen: 2 if seen[1] > 0 else 0,
        step_cost=1.0,
    ),
    "Acrobot": Family(
        actions=("Minus", "Rest", "Plus"),
        success=Success.TERMINATED,
        rules="You apply a torque to the joint between two hanging links. Swing the lower end above the line.",
        fields=("cos 1", "sin 1", "cos 2", "sin 2", "speed 1", "speed 2"),
        policy=lambda seen: 2 if seen[4] < 0 else 0,
        step_cost=1.0,
    ),
}


class Gym(Environment):
    """Play a gymnasium environment with discrete actions.

    ## Description
    An environment of gymnasium or of another library that registers its ids with it.

    ## Action Space
    `Discrete(n)`: `actions`. The names of FrozenLake, CliffWalking, Taxi, Blackjack, CartPole, MountainCar and
    Acrobot are known.

    ## Observation Space
    `Text`: the text rendering where the id has one (`ansi`), with brackets for coloured cells; otherwise the numbers
    of the observation.

    ## Starting State, Rewards, Episode End
    Those of the id.

    ## Information
    `success`: as the environment's own `info` says (`success`, `is_success`), or as `success` defines it.
    `action_is_effective`: the action changed the observation or ended the game.

    ## Arguments
    - `id`: gymnasium id, `module:name` where a module registers it. `settings`: the arguments of its constructor.
    - `actions`: names of the actions, in order; null for a known family.
    - `success`: "terminated", "positive" or "threshold"; null for the family's own, or "threshold" where it has one.
    - `rules`: instructions in full sentences; null for those of the family.
    """

    needs_trust = ("id", "settings")

    @checked_arguments
    def __init__(
        self,
        *,
        id: str = "Taxi-v4",
        settings: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        success: str | None = None,
        rules: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.family = FAMILIES.get(re.split(r"[-\d]|Slippery", re.split("[/:]", id)[-1])[0])
        self.game = self._make(id, dict(settings or {}))
        space = self.game.action_space
        if not isinstance(space, spaces.Discrete):
            raise ValueError(f"id={id}: found actions {space}, expected Discrete(n)")
        self._first = int(space.start)
        self.action_names = self._named(actions, count=int(space.n), id=id)
        self.action_space = spaces.Discrete(int(space.n))
        self.observation_space = spaces.Text(10_000)
        self.success = self._solved_by(success)
        general = f"You play {id}. Choose one of {', '.join(self.action_names)}."
        known = self.family.rules if self.family else general
        rendering = "" if rules else self._rendering()
        self.instructions = f"{rules or known} {rendering}".strip()
        self.format_penalty = max(_LEAST_PENALTY, self._worst_cost())
        self._seen: Any = None
        self._return = 0.0
        self._policy: dict[int, list[int]] = {}

    def _worst_cost(self) -> float:
        """Return the cost of the worst action of the game, 0 where it is not known."""
        table = getattr(self.game.unwrapped, "P", None)
        if table is None:
            return self.family.step_cost if self.family else 0.0
        moves = (
            move for moves in table.values() for outcomes in moves.values() for move in outcomes
        )
        return max(0.0, *(-float(reward) for _, _, reward, _ in moves))

    def _rendering(self) -> str:
        """Return how an observation shows the game, where that is known."""
        return self.family.rendering if self.family else ""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode."""
        self._begin(seed=seed, options=options)
        drawn = int(self.np_random.integers(2**31))
        self._seen, _ = self.game.reset(seed=drawn)
        self._return = 0.0
        return self._observation(), {}

    def step(self, action: int | np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Carry out an action."""
        taken, before = self._take(action), self.state_key()
        self._seen, reward, terminated, truncated, game_info = self.game.step(self._first + taken)
        self._return += float(reward)
        self._over = bool(terminated or truncated)
        info = {
            "success": self._is_solved(game_info, float(reward), bool(terminated)),
            # such as standing in blackjack, which shows the same hand
            "action_is_effective": bool(terminated) or self.state_key() != before,
        }
        return self._observation(), float(reward), bool(terminated), bool(truncated), info

    def close(self) -> None:
        """Close the game."""
        self.game.close()

    def state_key(self) -> str:
        """Return the observation of the game."""
        return json.dumps(_numbers(self._seen))

    def describe(self) -> str:
        """Return the numbers of the observation, the first ones of many: `sum 14, dealer 10, usable ace 0`."""
        return self._shown()[:_MAX_DESCRIPTION]

    def _shown(self) -> str:
        numbers = [_number(value) for value in _flat(_numbers(self._seen))]
        fields = self.family.fields if self.family else ()
        if len(fields) == len(numbers):
            numbers = [f"{name} {number}" for name, number in zip(fields, numbers, strict=True)]
        return ", ".join(numbers)

    def difficulty(self) -> int:
        """Return 1: the episodes of an id count as equally hard."""
        return 1

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return an optimal action where the game has a table of its transitions, otherwise a good one.

        Raises:
            NotImplementedError: The game has no table, and no policy for its family is known.
        """
        game: Any = self.game.unwrapped
        if hasattr(game, "P") and isinstance(self._seen, int | np.integer):
            self._policy = self._policy or _optimal_actions(game.P)
            best = self._policy[int(self._seen)]
            return best[int(rng.integers(len(best)))]
        if self.family is None or self.family.policy is None:
            raise NotImplementedError("id: no policy for this game is known")
        return self.family.policy(self._seen)

    def render(self) -> Any:
        """Return the current observation (`render_mode="ansi"`)."""
        return self._observation()

    def _make(self, id: str, settings: dict[str, Any]) -> gymnasium.Env[Any, Any]:
        modes = _render_modes(id)
        if "ansi" in modes:
            settings["render_mode"] = "ansi"
        return made(id, settings)

    def _observation(self) -> Observation:
        if self.game.render_mode != "ansi":
            return self._shown()
        return _without_colours(str(self.game.render()))

    def _named(self, actions: Sequence[str] | None, *, count: int, id: str) -> tuple[str, ...]:
        names = tuple(actions) if actions else self.family.actions if self.family else ()
        if len(names) != count:
            raise ValueError(
                f"actions: found {list(names)}, expected names of the {count} actions of {id}"
            )
        return names

    def _solved_by(self, success: str | None) -> Success:
        if success is not None:
            if success not in list(Success):
                raise ValueError(
                    f"success: found {success!r}, expected one of {', '.join(Success)}"
                )
            if success == Success.THRESHOLD and self._threshold is None:
                raise ValueError(
                    "success=threshold: the id has no reward_threshold, so no episode would count as solved; set "
                    "terminated or positive"
                )
            return Success(success)
        if self.family:
            return self.family.success
        return Success.POSITIVE if self._threshold is None else Success.THRESHOLD

    @property
    def _threshold(self) -> float | None:
        return self.game.spec.reward_threshold if self.game.spec else None

    def _is_solved(self, info: Mapping[str, Any], reward: float, terminated: bool) -> bool:
        for name in ("success", "is_success"):
            if name in info:
                return bool(info[name])
        if self.success is Success.THRESHOLD:
            return self._threshold is not None and self._return >= self._threshold
        return terminated and (self.success is Success.TERMINATED or reward > 0)


def made(id: str, settings: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """Make the environment of an id.

    Raises:
        ValueError: Its constructor does not take the settings.
    """
    try:
        return gymnasium.make(id, disable_env_checker=True, **settings)
    except TypeError as error:
        wrong = [name for name in settings if f"'{name}'" in str(error)]
        remedy = "".join(f"; '~env.kwargs.settings.{name}' removes it" for name in wrong)
        raise ValueError(f"settings of id={id}: {error}{remedy}") from None


def _render_modes(id: str) -> list[str]:
    """Return how an id can be rendered.

    Raises:
        ValueError: There is no such id.
    """
    module, _, name = id.rpartition(":")
    try:
        if module:
            import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"id={id}: {error}") from None
    try:
        spec = gymnasium.spec(name)
        creator = spec.entry_point
        made = (
            gymnasium.envs.registration.load_env_creator(creator)
            if isinstance(creator, str)
            else creator
        )
    except (Error, ImportError) as error:
        raise ValueError(f"id={id}: {error}") from error
    return list(getattr(made, "metadata", {}).get("render_modes", []))


def _without_colours(text: str) -> str:
    def bracket(match: re.Match[str]) -> str:
        marks = _BRACKETS.get(match[1], "[]")
        return f"{marks[0]}{match[2]}{marks[1]}"

    # a colour that is set inside another one
    text = re.sub(r"(\x1b\[[0-9;]+m)+(?=\x1b\[[0-9;]+m)", "", text)
    return _ESCAPE.sub(bracket, text).replace(_RESET, "").strip("\n")


def _numbers(value: Any) -> Any:
    """Return an observation as plain numbers and lists."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _numbers(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_numbers(part) for part in value]
    return value


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [f"{name} {_number(part)}" for name, whole in value.items() for part in _flat(whole)]
    if isinstance(value, list):
        return [part for whole in value for part in _flat(whole)]
    return [value]


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _optimal_actions(table: Any) -> dict[int, list[int]]:
    """Return the optimal actions of each state by value iteration.

    Args:
        table: For each state and action the transitions (probability, next state, reward, whether it ends).
    """
    states = sorted(table)
    longest = max(len(moves) for state in states for moves in table[state].values())
    shape = (len(states), len(table[states[0]]), longest)
    chance, rewards, going = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    following = np.zeros(shape, np.int64)
    for state in states:
        for action, moves in table[state].items():
            for index, (probability, after, reward, ends) in enumerate(moves):
                place = state, action, index
                chance[place], rewards[place], following[place] = probability, reward, after
                going[place] = not ends
    values, gap = np.zeros(len(states)), math.inf
    for _ in range(_ROUNDS):
        returns = (chance * (rewards + _DISCOUNT * going * values[following])).sum(-1)
        gap, values = float(np.abs(returns.max(-1) - values).max()), returns.max(-1)
        if gap < _PRECISION:
            break
    best = returns >= values[:, None] - 1e-6
    return {state: [int(action) for action in np.flatnonzero(best[state])] for state in states}
