"""Base class of the environments, shared types, and checks of arguments, actions and reset options.

A trainer reads the public members of `Environment` from `env.unwrapped`.
"""

from __future__ import annotations

import functools
import json
import string
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

import gymnasium
import numpy as np
from annotated_types import Ge, Interval

Constructor = TypeVar("Constructor", bound=Callable[..., None])
Observation = str | dict[str, Any]
"""Text, or `{"text": str, "image": uint8[height, width, 3]}`, or `"images"` with a list of these."""

Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Reward = Annotated[float, Ge(0)]
Probability = Annotated[float, Interval(ge=0, le=1)]

MOVES = ("Up", "Down", "Left", "Right")
# A text observation of a larger grid is too long to be useful.
MAX_GRID = 16

PRINTABLE = frozenset(string.printable)
TEXT_CHARSET = frozenset(string.ascii_letters + string.digits + " ,.\n#_*")


class Symbols(StrEnum):
    """Vocabulary of a text observation: the one used in training, or a different one."""

    PLAIN = "plain"
    OTHER = "other"


class TextStyle(StrEnum):
    """Format of the text observation of a grid."""

    COORDINATES = "coordinates"
    GRID = "grid"


class Environment(gymnasium.Env[Observation, Any]):
    """Seeded environment with state keys, state descriptions and an optimal action.

    Actions are named (`Discrete`) or free text (`Text`). Subclasses set `instructions`, `action_space`,
    `observation_space` and, for named actions, `action_names`. They call `_begin` first in `reset`, and `_take` or
    `_take_text` first in `step`.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 (typed so by gymnasium)
    needs_trust: ClassVar[tuple[str, ...]]
    """Constructor arguments whose texts can make an environment start a process, import a module, open a
    file or connect, such as `("id", "settings")`. Each class has its own; a file of somebody else may not set them."""

    option_names: ClassVar[tuple[str, ...]] = ()
    """Keys accepted by `reset(options=...)`."""

    action_names: tuple[str, ...] = ()
    """Action names, in index order; empty where actions are free text."""

    instructions: str = ""
    """Rules of the environment in full sentences."""

    frequent_words: ClassVar[tuple[str, ...]] = ()
    """Frequent words of observations, descriptions and answers; each is a token of the small models, the longest that
    fits. Saved models depend on the words and their order."""

    def __init__(self, *, render_mode: str | None = None) -> None:
        modes = self.metadata["render_modes"]
        if render_mode is not None and render_mode not in modes:
            raise ValueError(f"render_mode: found {render_mode!r}, expected None or one of {modes}")
        self.render_mode = render_mode
        self.steps = 0
        """Number of steps since the last reset."""
        self._over = True

    def state_key(self) -> str:
        """Return a text key. Two states have the same key if and only if they are equal."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return a short true description of the current observation, without a plan."""
        raise NotImplementedError

    def difficulty(self) -> int:
        """Return the difficulty of the current state, or -1 if success is impossible."""
        raise NotImplementedError

    def optimal_action(self, rng: np.random.Generator) -> int | str:
        """Return an optimal action for the current state. `rng` breaks ties."""
        raise NotImplementedError

    def random_action(self, rng: np.random.Generator) -> int | str:
        """Return a valid action of a policy that knows the rules but not the task.

        Raises:
            NotImplementedError: Actions are free text and the environment draws none.
        """
        if not self.action_names:
            raise NotImplementedError(f"{type(self).__name__}: write a random_action(rng)")
        return int(rng.integers(len(self.action_names)))

    def _begin(self, *, seed: int | None, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
        super().reset(seed=seed)
        self._over, self.steps = False, 0
        options = options or {}
        unknown = [name for name in options if name not in self.option_names]
        if unknown:
            raise ValueError(
                f"reset(options=...) of {type(self).__name__}: found {unknown}, "
                f"expected only {list(self.option_names)}"
            )
        return options

    def _take(self, action: int | np.int64) -> int:
        if self._over:
            raise RuntimeError(f"{type(self).__name__}: the episode has ended; call reset() first")
        if not 0 <= action < len(self.action_names):
            raise ValueError(
                f"{type(self).__name__}: found action {action!r}, expected 0 to "
                f"{len(self.action_names) - 1} ({', '.join(self.action_names)})"
            )
        self.steps += 1
        return int(action)

    def _take_text(self, action: str) -> str:
        if self._over:
            raise RuntimeError(f"{type(self).__name__}: the episode has ended; call reset() first")
        if not isinstance(action, str):
            raise TypeError(f"{type(self).__name__}: found action {action!r}, expected a text")
        self.steps += 1
        return action


def check_number(
    value: float, *, name: str, low: float, high: float = float("inf"), whole: bool = False
) -> None:
    """Check an argument of an environment.

    Raises:
        TypeError: If the value is not a number, or not a whole number although `whole` is set.
        ValueError: If the value is outside [`low`, `high`].
    """
    kind = "a whole number" if whole else "a number"
    accepted = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise TypeError(f"{name}: found {value!r}, expected {kind}")
    if not low <= value <= high:
        limit = f"of at least {low}" if high == float("inf") else f"from {low} to {high}"
        raise ValueError(f"{name}: found {value!r}, expected {kind} {limit}")


def checked_arguments(constructor: Constructor) -> Constructor:
    """Return a constructor that checks its keyword arguments against their annotations.

    `Annotated` numbers have their bounds checked. The text of a `StrEnum` is replaced by its member.

    Raises:
        TypeError: At a call, not a number, or a fraction where a whole number is expected.
        ValueError: At a call, outside the bounds, or no member of the `StrEnum`.
    """

    @functools.wraps(constructor)
    def call(self: object, **settings: Any) -> None:
        annotations = get_type_hints(constructor, include_extras=True)
        given = {name: value for name, value in settings.items() if name in annotations}
        for name, value in given.items():
            settings[name] = _checked(value, name=name, annotation=annotations[name])
        constructor(self, **settings)

    return call  # type: ignore[return-value]


def _checked(value: Any, *, name: str, annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        if value not in list(annotation):
            expected = ", ".join(annotation)
            raise ValueError(f"{name}: found {value!r}, expected one of {expected}")
        return annotation(value)
    # of a union with None, the number
    options = [
        option for option in (*get_args(annotation), annotation) if hasattr(option, "__metadata__")
    ]
    if options and value is not None:
        number, bounds = get_args(options[0])
        low, high = bounds.ge, getattr(bounds, "le", None)
        high = float("inf") if high is None else high
        check_number(value, name=name, low=low, high=high, whole=number is int)
    return value


def call_text(name: str, **arguments: Any) -> str:
    """Return the call of a tool as a policy writes it.

    >>> call_text("refund", order="A17")
    '{"name": "refund", "arguments": {"order": "A17"}}'
    """
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def cells_text(cells: Iterable[int], *, size: int) -> str:
    """Return the row and column of each cell, such as `0 1, 2 2`, or `none`.

    >>> cells_text([1, 10], size=4)
    '0 1, 2 2'
    """
    return ", ".join(f"{cell // size} {cell % size}" for cell in cells) or "none"


def bits(mask: int) -> list[int]:
    """Return the indices of the set bits in ascending order.

    >>> bits(0b1010)
    [1, 3]
    """
    indices = []
    while mask:
        lowest = mask & -mask
        indices.append(lowest.bit_length() - 1)
        mask ^= lowest
    return indices
