"""FrozenLake maps: random solvable maps, maps from text rows, distances and transition outcomes.

Cells are numbered row by row. A set of cells is an int whose bit i is cell i, and a breadth-first search
takes a few shifts per step. Episodes are in `envs.frozen_lake`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_TRIES = 20_000
# Discount of the value iteration: it prefers short paths and makes the iteration converge.
_DISCOUNT = 0.99


class FrozenLakeMap(NamedTuple):
    """Static part of a FrozenLake state."""

    size: int
    start: int
    goal: int
    holes: int  # bit set of cells
    distance: int  # length of the shortest path from start to goal, in moves


@cache
def neighbors(size: int) -> tuple[tuple[int, int, int, int], ...]:
    """Return the cells that Up, Down, Left and Right lead to from each cell; a move off the edge stays.

    >>> neighbors(2)[1]
    (1, 3, 0, 1)
    """
    return tuple(
        (
            max(row - 1, 0) * size + column,
            min(row + 1, size - 1) * size + column,
            row * size + max(column - 1, 0),
            row * size + min(column + 1, size - 1),
        )
        for row in range(size)
        for column in range(size)
    )


def draw_map(
    rng: np.random.Generator,
    *,
    size: int,
    hole_fraction: float,
    min_distance: int,
    max_distance: int,
    random_start: bool,
    min_detour: int = 0,
) -> FrozenLakeMap:
    """Draw start, goal and holes until the shortest path has `min_distance` to `max_distance` moves.

    Every cell except start and goal is a hole with probability `hole_fraction`. Rejection sampling keeps the
    distribution of such maps conditioned on the distance, and on holes that lengthen the shortest path
    by at least `min_detour` moves.

    Raises:
        RuntimeError: If 20,000 maps in a row were rejected.
    """
    cells = size * size
    marks = _marks(size)
    start, goal = 0, cells - 1
    for _ in range(_TRIES):
        *draws, first, second = rng.random(cells + 2).tolist()
        if random_start:
            start = int(first * cells)
            goal = int(second * (cells - 1))
            goal += goal >= start
        holes = sum([mark for mark, draw in zip(marks, draws, strict=True) if draw < hole_fraction])
        holes &= ~(marks[start] | marks[goal])
        distance = walk_distance(size, start=start, goal=goal, holes=holes)
        direct = abs(start // size - goal // size) + abs(start % size - goal % size)
        if min_distance <= distance <= max_distance and distance - direct >= min_detour:
            return FrozenLakeMap(size, start, goal, holes, distance)
    raise RuntimeError(
        f"{_TRIES} lakes of size {size} with hole_fraction {hole_fraction} in a row had no goal "
        f"{min_distance} to {max_distance} moves from the start, {min_detour} of them a detour; set a "
        "smaller min_distance, min_detour or hole_fraction, or a larger max_distance"
    )


def read_map(rows: Sequence[str], *, size: int) -> FrozenLakeMap:
    """Read a map from rows of gymnasium's letters: S start, F ice, H hole, G goal.

    Raises:
        ValueError: If there are not `size` rows of `size` such letters, or not one S and one G.
    """
    text = "".join(rows)
    square = len(rows) == size and all(len(row) == size for row in rows)
    if not square or set(text) - set("SFHG") or text.count("S") != 1 or text.count("G") != 1:
        raise ValueError(
            f"layout: found {list(rows)}, expected {size} rows of {size} letters "
            "out of S (start, once), F (ice), H (hole) and G (goal, once)"
        )
    start, goal = text.index("S"), text.index("G")
    holes = sum(1 << cell for cell, letter in enumerate(text) if letter == "H")
    return FrozenLakeMap(
        size, start, goal, holes, walk_distance(size, start=start, goal=goal, holes=holes)
    )


def walk_distance(size: int, *, start: int, goal: int, holes: int) -> int:
    """Return the length of the shortest path from `start` to `goal` around `holes`, or -1 without a path."""
    open_cells, not_left, not_right = _masks(size)
    open_cells &= ~holes
    target = 1 << goal
    front = seen = 1 << start
    distance = 0
    while front:
        if front & target:
            return distance
        spread = front << size | front >> size | (front & not_right) << 1 | (front & not_left) >> 1
        front = spread & open_cells & ~seen
        seen |= front
        distance += 1
    return -1


def outcomes(action: int, *, slip_probability: float) -> list[tuple[float, int]]:
    """Return (probability, actual direction): the intended direction and the two perpendicular ones."""
    if slip_probability == 0.0:
        return [(1.0, action)]
    sides = (2, 3) if action < 2 else (0, 1)
    side = slip_probability / 2
    return [(1.0 - slip_probability, action), (side, sides[0]), (side, sides[1])]


def action_values(lake: FrozenLakeMap, *, slip_probability: float) -> NDArray[np.float64]:
    """Return the optimal discounted probability of reaching the goal, `[cell, action]`, by value iteration."""
    cells = lake.size * lake.size
    leads = np.array(neighbors(lake.size))
    walkable = np.array([not lake.holes >> cell & 1 for cell in range(cells)])
    mixing = np.zeros((4, 4))
    for action in range(4):
        for probability, direction in outcomes(action, slip_probability=slip_probability):
            mixing[direction, action] += probability
    values = np.zeros(cells)
    q = np.zeros((cells, 4))
    for _ in range(2_000):
        values[lake.goal] = 1.0
        q = _DISCOUNT * values[leads] @ mixing
        updated = np.where(walkable, q.max(axis=1), 0.0)
        updated[lake.goal] = 1.0
        done = np.abs(updated - values).max() < 1e-10
        values = updated
        if done:
            break
    return q


@cache
def _marks(size: int) -> tuple[int, ...]:
    return tuple(1 << cell for cell in range(size * size))


@cache
def _masks(size: int) -> tuple[int, int, int]:
    cells = (1 << size * size) - 1
    left = sum(1 << row * size for row in range(size))
    return cells, cells & ~left, cells & ~(left << size - 1)
