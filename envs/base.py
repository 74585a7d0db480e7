"""What every environment shares: types, and the checks of arguments, actions and reset options.

The protocol a trainer reads off `env.unwrapped` is the public part of `Environment`. No rules here.
"""

from __future__ import annotations

import string
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar

import gymnasium
import numpy as np

Observation = str | dict[str, Any]
"""Text, or `{"text": str, "image": uint8[height, width, 3]}`."""

MOVES = ("Up", "Down", "Left", "Right")
MAX_GRID = 16  # beyond it a text observation is too long to be of use

TEXT_CHARSET = frozenset(string.ascii_letters + string.digits + " ,.\n#_*")


class TextStyle(StrEnum):
    """How a grid is told in words."""

    COORDINATES = "coordinates"
    GRID = "grid"


class World(gymnasium.Env[Observation, np.int64]):
    """A discrete world determined by its seed, with what agents, players and panels ask of it.

    Subclasses set `action_names`, `instructions`, `action_space` and `observation_space`, call
    `_begin` first in `reset` and `_take` first in `step`.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012 (typed so by gymnasium)
    option_names: ClassVar[tuple[str, ...]] = ()
    """Keys that `reset(options=…)` understands."""

    action_names: tuple[str, ...] = ()
    """The name of each action, by index."""

    instructions: str = ""
    """The rules, in full sentences, told once."""

    def __init__(self, *, render_mode: str | None = None) -> None:
        modes = self.metadata["render_modes"]
        if render_mode is not None and render_mode not in modes:
            raise ValueError(f"render_mode: found {render_mode!r}, expected None or one of {modes}")
        self.render_mode = render_mode
        self._over = True

    def state_key(self) -> str:
        """Return text that two states share exactly when they are equal."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return a short true sentence on what is seen now, without a plan."""
        raise NotImplementedError

    def difficulty(self) -> int:
        """Return how hard the present state is, -1 where success is out of reach."""
        raise NotImplementedError

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return a best action in the present state; `rng` breaks ties."""
        raise NotImplementedError

    def _begin(self, *, seed: int | None, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
        super().reset(seed=seed)
        self._over = False
        options = options or {}
        unknown = [name for name in options if name not in self.option_names]
        if unknown:
            raise ValueError(
                f"reset(options=…) of {type(self).__name__}: found {unknown}, "
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
        return int(action)


def check_number(
    value: float, *, name: str, low: float, high: float = float("inf"), whole: bool = False
) -> None:
    """Check an argument of an environment.

    Raises:
        TypeError: not a number, or a fraction where a whole number is due.
        ValueError: outside [`low`, `high`].
    """
    kind = "a whole number" if whole else "a number"
    accepted = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise TypeError(f"{name}: found {value!r}, expected {kind}")
    if not low <= value <= high:
        limit = f"of at least {low}" if high == float("inf") else f"from {low} to {high}"
        raise ValueError(f"{name}: found {value!r}, expected {kind} {limit}")


def check_choice(value: str, *, name: str, choices: Collection[str]) -> None:
    """Check that an argument is one of a closed set of words, else raise ValueError."""
    if value not in choices:
        expected = ", ".join(str(choice) for choice in choices)
        raise ValueError(f"{name}: found {value!r}, expected one of {expected}")


def cells_text(cells: Iterable[int], *, size: int) -> str:
    """Return cells as row and column, as `0 1, 2 2`, or `none`.

    >>> cells_text([1, 10], size=4)
    '0 1, 2 2'
    """
    return ", ".join(f"{cell // size} {cell % size}" for cell in cells) or "none"


def bits(mask: int) -> list[int]:
    """Return the indices of the set bits, lowest first.

    >>> bits(0b1010)
    [1, 3]
    """
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
