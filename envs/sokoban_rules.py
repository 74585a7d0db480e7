"""Sokoban rules on bit sets, searches for shortest solutions, and random solvable rooms.

Cells are numbered row by row. A set of cells is an int whose bit i is cell i. The border consists of walls,
and no shift of a floor cell leaves the room. Episodes are in `envs.sokoban`.
"""

from __future__ import annotations

from collections import deque
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from .base import bits

MAX_STATES = 4_000
_ROOM_TRIES = 500


class Room(NamedTuple):
    """Static part of a Sokoban state."""

    size: int
    floor: int  # bit set of the cells without a wall
    targets: int  # bit set, one target per box


class State(NamedTuple):
    """Dynamic part of a Sokoban state."""

    boxes: int  # bit set
    player: int  # bit set of the player's one cell


def steps(size: int) -> tuple[int, int, int, int]:
    """Return the offsets of a cell's number for Up, Down, Left and Right."""
    return -size, size, -1, 1


def shift(mask: int, by: int) -> int:
    """Return a bit set shifted by `by` cells.

    >>> shift(0b0100, -2), shift(0b0100, 1)
    (1, 8)
    """
    return mask << by if by > 0 else mask >> -by


def move(room: Room, state: State, *, action: int) -> State:
    """Return the state after a move. A move against a wall or an immovable box returns the same state."""
    by = steps(room.size)[action]
    ahead = shift(state.player, by)
    if not ahead & room.floor:
        return state
    if not ahead & state.boxes:
        return State(state.boxes, ahead)
    beyond = shift(ahead, by)
    if not beyond & room.floor & ~state.boxes:
        return state
    return State(state.boxes ^ ahead ^ beyond, ahead)


def region(room: Room, *, boxes: int, player: int) -> int:
    """Return the cells that the player can reach without a push."""
    size, free = room.size, room.floor & ~boxes
    reached = player
    while True:
        spread = reached | reached << 1 | reached >> 1 | reached << size | reached >> size
        spread &= free
        if spread == reached:
            return reached
        reached = spread


@lru_cache(maxsize=1024)
def live_cells(room: Room) -> int:
    """Return the cells from which a box that is alone in the room can be pushed to a target.

    With a box elsewhere a room has no solution.
    """
    live = room.targets
    while True:
        more = live
        for by in steps(room.size):
            # cells of a box with room for the player behind it
            more |= shift(live, -by) & room.floor & shift(room.floor, by)
        if more == live:
            return live
        live = more


def fewest_pushes(room: Room, state: State) -> int:
    """Return the number of pushes in the shortest solution, or -1 without a solution."""
    live = live_cells(room)
    if state.boxes & ~live:
        return -1
    first = (state.boxes, region(room, boxes=state.boxes, player=state.player))
    queue, depth = deque([first]), {first: 0}
    while queue:
        node = queue.popleft()
        boxes, reach = node
        if boxes == room.targets:
            return depth[node]
        free = room.floor & ~boxes
        for by in steps(room.size):
            for box in bits(shift(reach, by) & boxes & shift(free & live, -by)):
                here = 1 << box
                moved = boxes ^ here ^ shift(here, by)
                after = (moved, region(room, boxes=moved, player=here))
                if after not in depth:
                    depth[after] = depth[node] + 1
                    queue.append(after)
    return -1


def shortest_way(room: Room, state: State) -> list[tuple[State, int]]:
    """Return the (state, action) pairs of a solution with the fewest moves, empty without a solution."""
    live = live_cells(room)
    came: dict[State, tuple[State, int] | None] = {state: None}
    queue = deque([state])
    while queue:
        here = queue.popleft()
        if here.boxes == room.targets:
            way = []
            while (step := came[here]) is not None:
                way.append(step)
                here = step[0]
            return way[::-1]
        for action in range(4):
            after = move(room, here, action=action)
            if after not in came and not after.boxes & ~live:
                came[after] = (here, action)
                queue.append(after)
    return []


def pulled_states(room: Room, *, max_pushes: int) -> list[list[tuple[int, int]]]:
    """Return the (boxes, region) states by the number of pushes in their shortest solution, 0 to `max_pushes`.

    A breadth-first search pulls boxes backwards from the solved room. The depth of a state is the number of
    pushes in its shortest solution. The search stops after `MAX_STATES` states.
    """
    layer: list[tuple[int, int]] = []
    left = room.floor & ~room.targets
    while left:
        part = region(room, boxes=room.targets, player=left & -left)
        layer.append((room.targets, part))
        left &= ~part
    layers, seen = [layer], set(layer)
    while layer and len(layers) <= max_pushes and len(seen) < MAX_STATES:
        layer = []
        for boxes, reach in layers[-1]:
            for by in steps(room.size):
                free = room.floor & ~boxes
                for box in bits(boxes & shift(reach, -by) & shift(free, -2 * by)):
                    here = 1 << box
                    moved = boxes ^ here ^ shift(here, by)
                    node = (moved, region(room, boxes=moved, player=shift(here, 2 * by)))
                    if node not in seen:
                        seen.add(node)
                        layer.append(node)
        layers.append(layer)
    return layers


def draw_start(
    rng: np.random.Generator, *, size: int, boxes: int, walls: int, min_pushes: int, max_pushes: int
) -> tuple[Room, State, int]:
    """Draw a room, a start state whose shortest solution has `min_pushes` to `max_pushes` pushes, and that number.

    Inner walls and targets are uniform over those with a connected floor. The start state is uniform over
    box positions and the regions of the floor that the boxes leave.

    Raises:
        RuntimeError: If 500 rooms in a row had no such start state.
    """
    inner = inner_cells(size)
    for _ in range(_ROOM_TRIES):
        order = rng.permutation(len(inner)).tolist()
        cells = [1 << inner[index] for index in order]
        room = Room(size, sum(cells[walls:]), sum(cells[walls : walls + boxes]))
        if region(room, boxes=0, player=cells[-1]) != room.floor:
            continue
        layers = pulled_states(room, max_pushes=max_pushes)
        count = sum(len(layer) for layer in layers[min_pushes:])
        if not count:
            continue
        pick = int(rng.integers(count))
        for pushes in range(min_pushes, len(layers)):
            if pick < len(layers[pushes]):
                break
            pick -= len(layers[pushes])
        placed, reach = layers[pushes][pick]
        stands = bits(reach)
        player = 1 << stands[int(rng.integers(len(stands)))]
        return room, State(placed, player), pushes
    raise RuntimeError(
        f"{_ROOM_TRIES} rooms of size {size} with {boxes} boxes and {walls} inner walls in a row "
        f"had no start that takes {min_pushes} to {max_pushes} pushes; set fewer walls, a smaller "
        "min_pushes or a larger max_pushes"
    )


@cache
def inner_cells(size: int) -> tuple[int, ...]:
    """Return the cells inside the border.

    >>> inner_cells(4)
    (5, 6, 9, 10)
    """
    inside = range(1, size - 1)
    return tuple(row * size + column for row in inside for column in inside)
