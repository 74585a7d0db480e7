"""The pocket cube: a puzzle of 2 by 2 by 2 pieces that is solved by turning faces."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from gymnasium import spaces

from .base import TEXT_CHARSET, Environment, Observation, checked_arguments

State = bytes
"""Color of each of the 24 stickers."""

# the piece at left, bottom and back stays in its place
FACES = {"U": (1, 1), "R": (0, 1), "F": (2, 1)}
"""Axis and side of each face that turns."""
_ALL_FACES = {"U": (1, 1), "D": (1, -1), "L": (0, -1), "R": (0, 1), "F": (2, 1), "B": (2, -1)}
_COLORS = "WYGBRO"
TURNS = tuple(f"{face}{way}" for face in FACES for way in ("", "2", "-"))
"""Quarter turns, half turns, and quarter turns the other way."""


class PocketCube(Environment):
    """Solve a cube of 2 by 2 by 2 pieces by turning its faces.

    ## Description
    A state is drawn that a few turns solve. U turns the upper face clockwise, R the right one and F the front; `2`
    turns it twice and `-` the other way.

    ## Action Space
    `Discrete(9)`: U, U2, U-, R, R2, R-, F, F2, F-.

    ## Observation Space
    `Text`: the colors of each face, row by row: `up WW WG down YY YY …`.

    ## Rewards
    1 when the cube is solved.

    ## Episode End
    Terminated when the cube is solved.

    ## Information
    `success`: the cube is solved. `action_is_effective`: always true.

    ## Arguments
    - `min_turns`, `max_turns`: fewest turns that solve the starting state, 1 to 6. The reset option `max_turns` sets
      them for an episode.

    ## Trivial Policies
    Who makes the same turns in the same order has success at most 0.1 with the shipped settings, in which no cube is
    one turn from its solution.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    action_names = TURNS
    frequent_words = (
        "up", "down", "left", "right", "front", "back", "whole", "U2", "U-", "R2", "R-", "F2", "F-",
    )  # fmt: skip
    option_names = ("max_turns",)
    instructions = (
        "You have a cube of 2 by 2 by 2 pieces. Make each of its six faces one color. U turns the upper face "
        "clockwise, R the right face and F the front face; 2 behind it turns it twice, - turns it the other way. Each "
        "turn shows the colors of all faces, W white, Y yellow, G green, B blue, R red and O orange."
    )

    @checked_arguments
    def __init__(
        self,
        *,
        min_turns: Annotated[int, Interval(ge=1, le=6)] = 1,
        max_turns: Annotated[int, Interval(ge=1, le=6)] = 3,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if min_turns > max_turns:
            raise ValueError(
                f"min_turns: found {min_turns}, expected at most max_turns={max_turns}"
            )
        self.min_turns, self.max_turns = min_turns, max_turns
        self.action_space = spaces.Discrete(len(TURNS))
        self.observation_space = spaces.Text(max_length=80, charset=TEXT_CHARSET)
        self.stickers = _solved()

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a state by the number of turns that solve it, then uniformly."""
        options = self._begin(seed=seed, options=options)
        max_turns = options.get("max_turns", self.max_turns)
        if max_turns not in range(self.min_turns, 7):
            raise ValueError(
                f"max_turns: found {max_turns!r}, expected a whole number from {self.min_turns} to 6"
            )
        distance = int(self.np_random.integers(self.min_turns, max_turns + 1))
        states = _states_at(distance)
        self.stickers = states[int(self.np_random.integers(len(states)))]
        return self._observation(), {}

    def step(self, action: int | np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Turn a face."""
        self.stickers = turned(self.stickers, TURNS[self._take(action)])
        self._over = self.stickers == _solved()
        info = {"success": self._over, "action_is_effective": True}
        return self._observation(), float(self._over), self._over, False, info

    def state_key(self) -> str:
        """Return the colors of all faces."""
        return self._observation()

    def describe(self) -> str:
        """Return how many faces have one color, and which: `2 whole up down`."""
        faces = self._faces()
        whole = [name for name, colors in faces.items() if len(set(colors)) == 1]
        return f"{len(whole)} whole {' '.join(whole)}".strip()

    def difficulty(self) -> int:
        """Return the fewest turns that solve the cube; 7 beyond six."""
        return distances().get(self.stickers, 7)

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return a turn on a shortest way; far from the end any turn."""
        own = self.difficulty()
        best = [
            action
            for action, name in enumerate(TURNS)
            if distances().get(turned(self.stickers, name), 7) < own
        ]
        return best[int(rng.integers(len(best)))] if best else int(rng.integers(len(TURNS)))

    def render(self) -> str:
        """Return the faces (`render_mode="ansi"`)."""
        return self._observation()

    def _faces(self) -> dict[str, str]:
        names = ("up", "down", "left", "right", "front", "back")
        colors = self.stickers.decode()
        return {name: colors[4 * n : 4 * n + 4] for n, name in enumerate(names)}

    def _observation(self) -> str:
        return " ".join(f"{name} {row[:2]} {row[2:]}" for name, row in self._faces().items())


Sticker = tuple[tuple[int, int, int], tuple[int, int, int]]
"""Place of a piece, coordinates 1 and -1, and the direction that its sticker faces."""


@cache
def _stickers() -> tuple[Sticker, ...]:
    """Return the stickers face by face, each face from its upper left corner as one looks at it."""
    stickers: list[Sticker] = []
    for name, (axis, side) in _ALL_FACES.items():
        direction = [0, 0, 0]
        direction[axis] = side
        # x to the right, y up, z to the front
        places = [place for place in product((-1, 1), repeat=3) if place[axis] == side]
        order = {
            "U": lambda p: (p[2], p[0]),
            "D": lambda p: (-p[2], p[0]),
            "L": lambda p: (-p[1], p[2]),
            "R": lambda p: (-p[1], -p[2]),
            "F": lambda p: (-p[1], p[0]),
            "B": lambda p: (-p[1], -p[0]),
        }[name]
        facing = (direction[0], direction[1], direction[2])
        stickers += [((p[0], p[1], p[2]), facing) for p in sorted(places, key=order)]
    return tuple(stickers)


@cache
def _source(turn: str) -> tuple[int, ...]:
    """Return for each sticker the index of the one that a turn brings there."""
    axis, side = FACES[turn[0]]
    quarters = {"": 1, "2": 2, "-": 3}[turn[1:]]
    stickers = _stickers()
    source = list(range(len(stickers)))
    for index, (place, direction) in enumerate(stickers):
        if place[axis] == side:
            for _ in range(quarters):
                place, direction = _clockwise(place, axis), _clockwise(direction, axis)
            source[stickers.index((place, direction))] = index
    return tuple(source)


def _clockwise(vector: tuple[int, int, int], axis: int) -> tuple[int, int, int]:
    """Turn a vector by a quarter, clockwise as seen from the positive end of an axis."""
    x, y, z = vector
    return {0: (x, z, -y), 1: (-z, y, x), 2: (y, -x, z)}[axis]


def turned(state: State, turn: str) -> State:
    """Return the state after a turn.

    >>> turned(turned(_solved(), "R"), "R-") == _solved()
    True
    """
    return bytes(state[index] for index in _source(turn))


@cache
def _solved() -> State:
    return "".join(color * 4 for color in _COLORS).encode()


@cache
def distances() -> dict[State, int]:
    """Return all states that six turns solve, with the fewest turns that do."""
    found, border = {_solved(): 0}, [_solved()]
    for distance in range(1, 7):
        after = (turned(state, name) for state in border for name in TURNS)
        border = list(dict.fromkeys(state for state in after if state not in found))
        found |= dict.fromkeys(border, distance)
    return found


@cache
def _states_at(distance: int) -> tuple[State, ...]:
    return tuple(state for state, found in distances().items() if found == distance)
