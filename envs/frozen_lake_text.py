"""Texts of FrozenLake: rules, grid of symbols and state description."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from .base import MOVES, Symbols
from .frozen_lake_map import FrozenLakeMap, neighbors

Grid = tuple[str, str, str, str, str, str]


class FrozenLakeStyle(StrEnum):
    """Format of the text observation."""

    COORDINATES = "coordinates"
    GRID = "grid"
    DIRECTIONS = "directions"


class Signs(NamedTuple):
    """Words of the coordinate format and symbols of the grid format."""

    you: str
    goal: str
    holes: str
    grid: Grid  # you, ice, hole, goal, you in a hole, you at the goal


SIGNS = {
    Symbols.PLAIN: Signs("me", "goal", "holes", ("P", "_", "O", "G", "X", "W")),
    Symbols.OTHER: Signs("walker", "flag", "pits", ("A", ".", "#", "F", "T", "E")),
}


def _grid_rule(signs: Signs) -> str:
    you, ice, hole, goal, sunk, there = signs.grid
    return (
        f"Each turn shows the lake row by row: {you} is you, {ice} is ice, {hole} is a hole, {goal} is the "
        f"goal, {sunk} is you in a hole, {there} is you at the goal."
    )


def _coordinates_rule(signs: Signs) -> str:
    words = (
        ""
        if signs is SIGNS[Symbols.PLAIN]
        else f" You are called {signs.you}, the goal {signs.goal} and the holes {signs.holes}."
    )
    return (
        "Each turn tells the row and the column of you, of the goal and of the holes; row 0 is the "
        f"top row and column 0 the left one.{words}"
    )


def _directions_rule(signs: Signs) -> str:
    return (
        f"Each turn tells the direction of the {signs.goal} from you, and those of the {signs.holes} in the cells "
        "around you."
    )


def rules(size: int, *, slip_probability: float, seen: str) -> str:
    """Return the rules, followed by `seen`, a sentence about the observation."""
    slips = (
        f" The ice is slippery: with probability {slip_probability:.2f} a move goes to one of the "
        "two sides at right angles instead."
        if slip_probability
        else ""
    )
    return (
        f"You walk on a frozen lake of {size} rows and {size} columns. Reach the goal without "
        "stepping into a hole: a hole ends the walk. The moves are Up, Down, Left and Right, one "
        f"cell each; a move against the edge leaves you where you are.{slips} {seen}"
    )


_RULES = {
    FrozenLakeStyle.COORDINATES: _coordinates_rule,
    FrozenLakeStyle.GRID: _grid_rule,
    FrozenLakeStyle.DIRECTIONS: _directions_rule,
}


def observation_rule(style: FrozenLakeStyle, *, signs: Signs) -> str:
    """Return the sentence that explains a text observation of this style."""
    return _RULES[style](signs)


def grid_text(lake: FrozenLakeMap, *, cell: int, grid: Grid) -> str:
    """Return the map as rows of symbols with the player in `cell`. `grid` is `Signs.grid`."""
    size = lake.size
    you, ice, hole, goal, sunk, there = grid
    symbols = [hole if lake.holes >> each & 1 else ice for each in range(size * size)]
    symbols[lake.goal] = goal
    symbols[cell] = {hole: sunk, goal: there}.get(symbols[cell], you)
    return "\n".join(" ".join(symbols[row * size : (row + 1) * size]) for row in range(size))


def directions_text(positions: Iterable[tuple[str, int, int]], *, signs: Signs) -> str:
    """Return where things are from the player: `goal Down Left holes Up, Up Right`, or `holes none`.

    Args:
        positions: As `relative_positions` returns them.
        signs: Words of the goal and of the holes.
    """
    towards: dict[str, list[str]] = {"goal": [], "hole": []}
    for name, rows, columns in positions:
        vertical = MOVES[rows > 0] if rows else ""
        horizontal = MOVES[2 + (columns > 0)] if columns else ""
        towards[name].append(f"{vertical} {horizontal}".strip() or "here")
    holes = ", ".join(towards["hole"]) or "none"
    return f"{signs.goal} {towards['goal'][0]} {signs.holes} {holes}"


def describe_state(lake: FrozenLakeMap, *, cell: int) -> str:
    """Return the player's cell, the goal and the moves into a hole: `me 1 2 goal 3 0 avoid Up Left`."""
    size, goal, holes = lake.size, lake.goal, lake.holes
    leads = neighbors(size)[cell]
    avoid = "".join(
        [
            f" {name}"
            for name, lead in zip(MOVES, leads, strict=True)
            if lead != cell and holes >> lead & 1
        ]
    )
    return f"me {cell // size} {cell % size} goal {goal // size} {goal % size} avoid{avoid}"


def relative_positions(lake: FrozenLakeMap, *, cell: int) -> list[tuple[str, int, int]]:
    """Return (name, rows down, columns right) of the goal and of the holes in and around a cell.

    Holes are in the order of their cells.
    """
    size = lake.size
    row, column = divmod(cell, size)
    positions = [("goal", lake.goal // size - row, lake.goal % size - column)]
    for rows in (-1, 0, 1):
        for columns in (-1, 0, 1):
            inside = 0 <= row + rows < size and 0 <= column + columns < size
            if inside and lake.holes >> (cell + rows * size + columns) & 1:
                positions.append(("hole", rows, columns))
    return positions
