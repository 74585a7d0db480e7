"""The game 2048 on a small board: slide tiles together until one has the target number."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from gymnasium import spaces

from .base import MOVES, TEXT_CHARSET, Environment, Observation, Reward, checked_arguments

Rows = tuple[tuple[int, ...], ...]
"""Exponents of the tiles, row by row; 0 is an empty cell."""

_FOUR_SHARE = 0.1


class Game2048(Environment):
    """Slide all tiles in one direction; two equal ones that meet become their sum. Reach the target number.

    ## Description
    After each move that changes the board a tile appears in an empty cell: 2, or 4 one time in ten.

    ## Action Space
    `Discrete(4)`: Up, Down, Left, Right.

    ## Observation Space
    `Text`: the rows with a comma between them, `_` for an empty cell: `2 _ 4, _ _ 2, 8 _ _`.

    ## Rewards
    1 when a tile has the target number, and `merge_reward` times the growth of the largest tile, as a
    fraction of the target.

    ## Episode End
    Terminated with the target number, or when no move changes the board.

    ## Information
    `success`: a tile has the target number. `action_is_effective`: the board changed.

    ## Arguments
    - `size`: rows and columns, 2 to 5. `target`: a power of 2 from 8 to 2048, at most 32 on 2 by 2 cells and 1024 on 3
      by 3, on which there is no room for a larger tile.
    - `merge_reward`: at least 0.

    ## Trivial Policies
    Who slides Up and Left in turn, and another way only where these change nothing, has success at most 0.5 with the
    shipped settings.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    action_names = MOVES
    option_names = ("target",)

    @checked_arguments
    def __init__(
        self,
        *,
        size: Annotated[int, Interval(ge=2, le=5)] = 3,
        target: Annotated[int, Interval(ge=8, le=2048)] = 32,
        merge_reward: Reward = 0.0,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.size, self.merge_reward = size, merge_reward
        self.target = self._goal = _power(target, size=size)
        self.instructions = self._rules()
        self.action_space = spaces.Discrete(len(MOVES))
        self.observation_space = spaces.Text(max_length=200, charset=TEXT_CHARSET)
        self._rows: Rows = ((0,) * size,) * size

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Put two tiles on an empty board. Option `target` sets another target number."""
        options = self._begin(seed=seed, options=options)
        self._goal = _power(options.get("target", 2**self.target), size=self.size)
        self.instructions = self._rules()
        self._rows = ((0,) * self.size,) * self.size
        for _ in range(2):
            self._add_tile()
        return self._observation(), {}

    def step(self, action: int | np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Slide the tiles."""
        moved = slid(self._rows, self._take(action))
        changed, before = moved != self._rows, _largest(self._rows)
        self._rows = moved
        if changed:
            self._add_tile()
        success = _largest(self._rows) >= self._goal
        self._over = success or not _moves(self._rows)
        grown = (2 ** _largest(self._rows) - 2**before) / 2**self._goal
        info = {"success": success, "action_is_effective": changed}
        reward = float(success) + self.merge_reward * grown
        return self._observation(), reward, self._over, False, info

    def _rules(self) -> str:
        return (
            f"You play 2048 on a board of {self.size} rows and {self.size} columns. A move slides all tiles Up, Down, "
            "Left or Right as far as they go, and two equal tiles that meet become one of twice the number. After "
            f"each move a tile 2 or 4 appears in an empty cell, shown as _. Make a tile of {2**self._goal} before no "
            "move is left."
        )

    def state_key(self) -> str:
        """Return the board and the target."""
        return f"{self._observation()} of {2**self._goal}"

    def describe(self) -> str:
        """Return how many pairs each move joins, `_` where it changes nothing: `Up 1 Down 1 Left 0 Right _`."""
        joined = []
        for move, name in enumerate(MOVES):
            after = slid(self._rows, move)
            pairs = _count(self._rows) - _count(after)
            joined.append(f"{name} {'_' if after == self._rows else pairs}")
        return " ".join(joined)

    def difficulty(self) -> int:
        """Return the exponent of the target number less that of the largest tile."""
        return max(0, self._goal - _largest(self._rows))

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return the move with the best mean value over all cells in which a 2 may appear. Not always optimal."""
        values = {move: _value_of_move(self._rows, move) for move in _moves(self._rows)}
        best = max(values.values())
        moves = [move for move, value in values.items() if value == best]
        return moves[int(rng.integers(len(moves)))]

    def render(self) -> str:
        """Return the board (`render_mode="ansi"`)."""
        return self._observation().replace(", ", "\n")

    def _observation(self) -> str:
        return ", ".join(
            " ".join(str(2**tile) if tile else "_" for tile in row) for row in self._rows
        )

    def _add_tile(self) -> None:
        cells = _empty(self._rows)
        row, column = cells[int(self.np_random.integers(len(cells)))]
        tile = 2 if self.np_random.random() < _FOUR_SHARE else 1
        self._rows = _with_tile(self._rows, row, column, tile)


def slid(rows: Rows, move: int) -> Rows:
    """Return the board after a move, before a tile appears.

    >>> slid(((1, 1, 1), (0, 2, 2), (3, 0, 0)), MOVES.index("Left"))
    ((2, 1, 0), (3, 0, 0), (3, 0, 0))
    """
    name = MOVES[move]
    lines = rows if name in ("Left", "Right") else tuple(zip(*rows, strict=True))
    backward = name in ("Right", "Down")
    lines = tuple(_joined(line[::-1])[::-1] if backward else _joined(line) for line in lines)
    return lines if name in ("Left", "Right") else tuple(zip(*lines, strict=True))


@lru_cache(maxsize=1 << 16)
def _joined(line: tuple[int, ...]) -> tuple[int, ...]:
    """Slide a line to its start."""
    tiles: list[int] = []
    joins = False
    for tile in filter(None, line):
        # a tile that was joined in this move is not joined again
        joins = bool(tiles) and tiles[-1] == tile and not joins
        if joins:
            tiles[-1] += 1
        else:
            tiles.append(tile)
    return (*tiles, *(0,) * (len(line) - len(tiles)))


def _moves(rows: Rows) -> list[int]:
    """Return the moves that change the board."""
    return [move for move in range(len(MOVES)) if slid(rows, move) != rows]


def _value_of_move(rows: Rows, move: int) -> float:
    """Return the mean value after a move, over the cells of the new tile."""
    after = slid(rows, move)
    boards = [_with_tile(after, row, column, 1) for row, column in _empty(after)]
    return sum(map(_value, boards)) / len(boards)


def _value(rows: Rows) -> float:
    if not _moves(rows):
        return -1000.0
    # room, and numbers that fall from one corner on
    lines = (*rows, *zip(*rows, strict=True))
    steps = sum(abs(a - b) for line in lines for a, b in pairwise(line))
    corner = max(rows[0][0], rows[0][-1], rows[-1][0], rows[-1][-1]) == _largest(rows)
    return 2.0 * len(_empty(rows)) - 0.5 * steps + 3.0 * corner


def _empty(rows: Rows) -> list[tuple[int, int]]:
    return [(r, c) for r, row in enumerate(rows) for c, tile in enumerate(row) if not tile]


def _with_tile(rows: Rows, row: int, column: int, tile: int) -> Rows:
    line = (*rows[row][:column], tile, *rows[row][column + 1 :])
    return (*rows[:row], line, *rows[row + 1 :])


def _largest(rows: Rows) -> int:
    return max(map(max, rows))


def _count(rows: Rows) -> int:
    return sum(tile > 0 for row in rows for tile in row)


def _power(target: object, *, size: int) -> int:
    """Return the exponent of a target number.

    Raises:
        ValueError: It is none, or no tile of a board can have it.
    """
    # of a chain of tiles that ends with a new 4
    largest = min(11, size**2 + 1)
    if target not in {2**power for power in range(3, largest + 1)}:
        raise ValueError(
            f"target: found {target!r}, expected a power of 2 from 8 to {2**largest} on {size} by {size} cells"
        )
    assert isinstance(target, int)
    return target.bit_length() - 1
