"""Texts of Sokoban: rules, coordinates, grid of symbols and state description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .base import MOVES, Symbols, TextStyle, bits, cells_text
from .sokoban_rules import Room, State, inner_cells, shift, steps


class Signs(NamedTuple):
    """Words of the coordinate format and symbols of the grid format."""

    you: str
    box: str
    target: str
    walls: str
    grid: str  # wall, floor, target, box, box on a target, you, you on a target


SIGNS = {
    Symbols.PLAIN: Signs("me", "box", "target", "walls", "#_OXBPS"),
    Symbols.OTHER: Signs("walker", "crate", "mark", "stones", "W.*C8AE"),
}
_PLAIN = SIGNS[Symbols.PLAIN]
_COORDINATES_RULE = (
    "Each turn tells the row and the column of you, of the boxes, of the targets and of the "
    "walls inside the room; row 0 is the top wall and column 0 the left one."
)


def rules(size: int, *, boxes: int, seen: str) -> str:
    """Return the rules, followed by `seen`, a sentence about the observation."""
    things = "the box onto the target" if boxes == 1 else f"the {boxes} boxes onto the targets"
    return (
        f"You are in a walled room of {size} rows and {size} columns, the outer walls counted. "
        f"Push {things}. The moves are Up, Down, Left and Right, one cell each. Walking into a box "
        "pushes it one cell further if nothing is behind it; a box cannot be pulled, and neither "
        f"you nor a box can enter a wall. {seen}"
    )


def observation_rule(style: TextStyle, *, signs: Signs) -> str:
    """Return the sentence that explains a text observation of this style."""
    if style is TextStyle.GRID:
        wall, floor, target, box, done, you, there = tuple(signs.grid)
        return (
            f"Each turn shows the room row by row: {wall} is a wall, {floor} is floor, {target} is a target, {box} "
            f"is a box, {done} is a box on a target, {you} is you, {there} is you on a target."
        )
    if signs is _PLAIN:
        return _COORDINATES_RULE
    return (
        f"{_COORDINATES_RULE} You are called {signs.you}, a box {signs.box}, a target {signs.target} and the walls "
        f"{signs.walls}."
    )


def coordinates_text(room: Room, state: State, *, signs: Signs = _PLAIN) -> str:
    """Return the room as `me 1 2 box 2 3 target 4 4 walls 2 2, 3 1`, without the border walls."""
    inside = sum(1 << cell for cell in inner_cells(room.size))
    walls = cells_text(bits(inside & ~room.floor), size=room.size)
    return f"{_things(room, state, signs)} {signs.walls} {walls}"


def describe_state(room: Room, state: State) -> str:
    """Return the cells of player, boxes and targets, and the moves that lead into a wall."""
    adjacent_walls = [
        f" {name}"
        for name, by in zip(MOVES, steps(room.size), strict=True)
        if not shift(state.player, by) & room.floor
    ]
    return f"{_things(room, state, _PLAIN)} walls{''.join(adjacent_walls)}"


def relative_positions(room: Room, state: State) -> list[tuple[str, int, int]]:
    """Return (name, rows down, columns right) of every box and target relative to the player."""
    row, column = divmod(state.player.bit_length() - 1, room.size)
    return [
        (name, cell // room.size - row, cell % room.size - column)
        for name, cells in (("box", state.boxes), ("target", room.targets))
        for cell in bits(cells)
    ]


def grid_text(room: Room, state: State, *, signs: Signs = _PLAIN) -> str:
    """Return the room as rows of symbols."""
    size = room.size
    symbols = [signs.grid[code] for code in tile_codes(room, state)]
    return "\n".join(" ".join(symbols[row * size : (row + 1) * size]) for row in range(size))


def tile_codes(room: Room, state: State) -> list[int]:
    """Return a code from 0 to 6 per cell.

    The codes stand for wall, floor, target, box, box on target, player and player on target, in this order.
    """
    codes = [room.floor >> cell & 1 for cell in range(room.size * room.size)]
    for cell in bits(room.targets):
        codes[cell] = 2
    for cell in bits(state.boxes):
        codes[cell] += 2
    codes[state.player.bit_length() - 1] += 4
    return codes


def read_room(rows: Sequence[str], *, size: int) -> tuple[Room, State]:
    """Read a room and a state from rows of plain grid symbols. Blanks are ignored.

    Raises:
        ValueError: If there are not `size` rows of `size` symbols within a border of walls, not exactly one
            player, or not as many boxes as targets.
    """
    rows = [row.replace(" ", "") for row in rows]
    text = "".join(rows)
    square = len(rows) == size and all(len(row) == size for row in rows)
    border = set(range(size * size)) - set(inner_cells(size))
    player = [cell for cell, symbol in enumerate(text) if symbol in "PS"]
    boxes, targets = _cells(text, "XB"), _cells(text, "OBS")
    closed = square and all(text[cell] == "#" for cell in border)
    balanced = 0 < boxes.bit_count() == targets.bit_count()
    if not closed or set(text) - set(_PLAIN.grid) or len(player) != 1 or not balanced:
        raise ValueError(
            f"layout: found {rows}, expected {size} rows of {size} symbols out of {_PLAIN.grid}, "
            "closed by #, with one player (P or S) and as many boxes (X, B) as targets (O, B, S)"
        )
    return Room(size, _cells(text, "_OXBPS"), targets), State(boxes, 1 << player[0])


def _cells(text: str, symbols: str) -> int:
    return sum(1 << cell for cell, symbol in enumerate(text) if symbol in symbols)


def _things(room: Room, state: State, signs: Signs) -> str:
    size = room.size
    me, boxes, targets = (
        cells_text(bits(mask), size=size) for mask in (state.player, state.boxes, room.targets)
    )
    return f"{signs.you} {me} {signs.box} {boxes} {signs.target} {targets}"
