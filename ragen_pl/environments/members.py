"""Members of an environment beyond gymnasium's interface, each held against its type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from reprlib import repr as shortened
from typing import Annotated, Any

import gymnasium
import numpy as np
from annotated_types import Interval
from gymnasium import spaces

from ragen_pl.base.constraints import Count, validated
from ragen_pl.trajectory import Relation

_Penalty = Annotated[float, Interval(ge=0, lt=1e30)]


class EnvironmentMembers:
    """Members of an environment beyond gymnasium's interface; all but `action_names` are optional.

    A method that is missing or not implemented reads as one that returns None.

    Args:
        env: The environment, with any wrappers.

    Raises:
        TypeError: From any member, if it has another type.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._environment: Any = env.unwrapped

    @property
    def action_names(self) -> Sequence[str] | None:
        """Name of each action, by index; None where actions are free text."""
        if isinstance(self._environment.action_space, spaces.Text):
            return None
        names: Sequence[str] = self._environment.action_names
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"found action_names={shortened(names)}, expected texts")
        return names

    @property
    def max_action_length(self) -> int | None:
        """Largest number of characters of a free-text action; None for named actions."""
        space = self._environment.action_space
        return space.max_length if isinstance(space, spaces.Text) else None

    @property
    def instructions(self) -> str:
        """Rules in full sentences; empty without any."""
        return str(getattr(self._environment, "instructions", ""))

    @property
    def rules(self) -> str:
        """Rules without the list of tools; the instructions of an environment without tools."""
        return str(getattr(self._environment, "rules", self.instructions))

    @property
    def tool_schemas(self) -> Sequence[Mapping[str, Any]]:
        """Tools in the format of OpenAI's API; empty without any."""
        schemas: Sequence[Mapping[str, Any]] = getattr(self._environment, "tool_schemas", ())
        for schema in schemas:
            match schema:
                case {"function": {"name": _, "parameters": _}}:
                    pass
                case _:
                    raise TypeError(
                        f"found {shortened(schema)} in tool_schemas, expected "
                        '{"type": "function", "function": {"name", "description", "parameters"}}'
                    )
        return schemas

    @property
    def relation_names(self) -> tuple[str, ...]:
        """All things that `relations` may name; empty where the environment does not list them."""
        return tuple(getattr(self._environment, "relation_names", ()))

    @property
    def reward_range(self) -> tuple[float, float] | None:
        """Lowest and highest reward of a step, where the environment declares them."""
        declared = getattr(self._environment, "reward_range", None)
        if declared is None:
            return None
        if isinstance(declared, Sequence) and len(declared) == 2:
            low, high = declared
            if isinstance(low, Real) and isinstance(high, Real) and low <= high:
                return float(low), float(high)
        raise TypeError(
            f"found reward_range={shortened(declared)}, expected the lowest and the highest reward of a step"
        )

    @property
    def draws_held_out(self) -> bool:
        """Whether `reset` takes the option `held_out`: true for an episode of validation, false for one of training."""
        return bool(getattr(self._environment, "draws_held_out", False))

    @property
    def format_penalty(self) -> float | None:
        """Penalty of a response without a valid action that suits its rewards; None where it declares none."""
        penalty: float | None = self._declared("format_penalty", _Penalty | None, None)
        return penalty

    @property
    def seats(self) -> int:
        """Number of seats that the policy plays, each with a conversation of its own; 1 where it has none."""
        seats: int = self._declared("seats", Count, 1)
        return seats

    def _declared(self, name: str, annotation: Any, default: Any) -> Any:
        """Return an attribute as an annotation has it; the default where there is none."""
        value = getattr(self._environment, name, default)
        try:
            return validated(annotation, value)
        except ValueError as error:
            raise TypeError(f"found {name}={shortened(value)}, {error}") from None

    def to_move(self) -> int:
        """Return the seat that is to move, or moved last at the end of a game."""
        seat, seats = self._call("to_move", (int, np.integer)), self.seats
        if seat is None or not 0 <= seat < seats:
            raise TypeError(
                f"to_move() returned {shortened(seat)}, expected a seat from 0 to {seats - 1}"
            )
        return int(seat)

    def observe(self, seat: int) -> object:
        """Return the observation of a seat, not read yet."""
        seen = self._call("observe", object, seat)
        if seen is None:
            raise TypeError(
                f"it has seats={self.seats} and no observe(seat); write one that returns what a seat sees"
            )
        return seen

    @property
    def user_seat(self) -> int | None:
        """The seat of a simulated user, where there are several; None without one."""
        declared = getattr(self._environment, "user_seat", None)
        if declared is None:
            return None
        if isinstance(declared, int | np.integer) and 0 <= declared < self.seats:
            return int(declared)
        raise TypeError(
            f"found user_seat={shortened(declared)}, expected None or a seat from 0 to {self.seats - 1}"
        )

    def seat_instructions(self, seat: int) -> str | None:
        """Return the rules of a seat that has its own and no tools; None for `instructions`."""
        return self._call("seat_instructions", str, seat)

    @property
    def forfeits(self) -> bool:
        """Whether it has a `forfeit`."""
        return hasattr(self._environment, "forfeit")

    def forfeit(self, seat: int) -> object:
        """End the episode as lost for a seat, and return what a step returns."""
        return self._environment.forfeit(seat)

    def state_key(self) -> str | None:
        """Return text that two states share exactly when they are equal."""
        return self._call("state_key", str)

    def describe(self) -> str | None:
        """Return a true description of the present state."""
        return self._call("describe", str)

    def plan(self) -> str | None:
        """Return the next part of a good way in words, for the reasoning of demonstrations."""
        return self._call("plan", str)

    def difficulty(self) -> int | None:
        """Return how hard the present state is."""
        difficulty = self._call("difficulty", (int, np.integer))
        return None if difficulty is None else int(difficulty)

    def potential(self) -> float | None:
        """Return the potential of the present state, by which rewards may be shaped."""
        potential = self._call("potential", (int, float, np.number))
        return None if potential is None else float(potential)

    def relations(self) -> list[Relation] | None:
        """Return the positions of things relative to the player."""
        return self._call("relations", (list, tuple))

    def random_action(self, rng: np.random.Generator) -> int | str:
        """Return an action that the rules allow: of named ones any, of free texts one that the environment draws.

        Raises:
            TypeError: Actions are free text, and the environment has no `random_action`.
        """
        drawn: int | str | None = self._call("random_action", object, rng)
        if drawn is not None:
            return drawn
        if self.action_names is None:
            raise TypeError("actions are free text and it has no random_action(rng); write one")
        return int(rng.integers(len(self.action_names)))

    def _call(self, name: str, kind: type | tuple[type, ...], *arguments: Any) -> Any:
        """Return a method's result, None if there is no such method."""
        method = getattr(self._environment, name, None)
        try:
            value = None if method is None else method(*arguments)
        except NotImplementedError:
            return None
        if value is None or isinstance(value, kind):
            return value
        expected = kind[0] if isinstance(kind, tuple) else kind
        raise TypeError(
            f"{name}() returned a value of type {type(value).__name__}, expected {expected.__name__}"
        )
