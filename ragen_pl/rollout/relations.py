"""Where things are from the player, in words and as claims that can be counted and compared.

A statement names things, each with the directions it lies in: `goal Down Left hole Up`. An axis without a
word says that the thing is level with the player. Judging whole rollouts is `rollout.world_model`'s part.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

from ragen_pl.trajectory import Relation


class Axis(StrEnum):
    """One of the two relations between the player and a thing."""

    VERTICAL = "vertical"
    HORIZONTAL = "horizontal"


Claims = Counter[tuple[str, Axis, int | None]]
"""How often a statement says (thing, axis, sign): -1 up or left, 0 level, 1 down or right, None both at once."""

_DIRECTIONS = {
    **dict.fromkeys(("up", "above", "north", "top"), (Axis.VERTICAL, -1)),
    **dict.fromkeys(("down", "below", "south", "under", "bottom"), (Axis.VERTICAL, 1)),
    **dict.fromkeys(("left", "west"), (Axis.HORIZONTAL, -1)),
    **dict.fromkeys(("right", "east"), (Axis.HORIZONTAL, 1)),
}
_WORDS = {
    (Axis.VERTICAL, -1): "Up",
    (Axis.VERTICAL, 1): "Down",
    (Axis.HORIZONTAL, -1): "Left",
    (Axis.HORIZONTAL, 1): "Right",
}
_MOST_THINGS = 64  # that are read of one statement: beyond it a response only repeats itself


def tell(relations: Iterable[Relation]) -> str:
    """Return relations in words, as a demonstration states them.

    >>> tell([("goal", 2, -1), ("hole", 0, 1), ("target", 0, 0)])
    'goal Down Left hole Right target here'
    """
    said = []
    for name, *offsets in relations:
        ways = [
            _WORDS[axis, sign(offset)] for axis, offset in zip(Axis, offsets, strict=True) if offset
        ]
        said.append(" ".join([name, *(ways or ["here"])]))
    return " ".join(said)


def read(text: str, names: Sequence[str]) -> Claims:
    """Return what a statement claims. Words that are neither a thing nor a direction are passed over.

    Args:
        text: anything a policy may write.
        names: the things of the environment; a plural is read as its singular.

    >>> sorted(read("The goal is below, to the left; no dragons.", ["goal"]))
    [('goal', <Axis.HORIZONTAL: 'horizontal'>, -1), ('goal', <Axis.VERTICAL: 'vertical'>, 1)]
    """
    known = {name.casefold(): name for name in names}
    things: list[tuple[str, dict[Axis, set[int]]]] = []
    for word in re.findall(r"[^\W\d_]+", text.casefold()):
        name = known.get(word) or known.get(word.removesuffix("s")) or known.get(word[:-2])
        if name is not None:
            if len(things) == _MOST_THINGS:
                break
            things.append((name, {axis: set() for axis in Axis}))
        elif word in _DIRECTIONS and things:
            axis, way = _DIRECTIONS[word]
            things[-1][1][axis].add(way)
    claims: Claims = Counter()
    for name, ways in things:
        for axis in Axis:
            said = ways[axis]
            claims[name, axis, None if len(said) > 1 else next(iter(said), 0)] += 1
    return claims


def truth(relations: Iterable[Relation]) -> Claims:
    """Return the claims of a statement that tells these relations and no others."""
    claims: Claims = Counter()
    for name, rows, columns in relations:
        claims[name, Axis.VERTICAL, sign(rows)] += 1
        claims[name, Axis.HORIZONTAL, sign(columns)] += 1
    return claims


def f1(said: Claims, true: Claims) -> float:
    """Return the harmonic mean of precision and recall of the claims; 0 where nothing is said.

    `2 |said ∩ true| / (|said| + |true|)`, counted with repetition, so that a thing told twice needs two.

    >>> true = truth([("goal", 1, -1)])
    >>> f1(read("goal Down Left", ["goal"]), true), f1(read("goal Up Left", ["goal"]), true)
    (1.0, 0.5)
    """
    if not said:
        return 0.0
    return 2 * (said & true).total() / (said.total() + true.total())


def sign(number: int) -> int:
    """Return -1, 0 or 1."""
    return (number > 0) - (number < 0)
