"""Positions of things relative to the player, in words and as claims that can be counted and compared.

A statement names things with their directions: `goal Down Left hole Up`. An axis without a direction word
claims that the thing is level with the player. `rewards.world_model` scores the statements of a rollout.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache

from ragen_pl.base.prompt_formats import BLOCKS
from ragen_pl.trajectory import Relation, Statement


class Axis(StrEnum):
    """Axis along which the player and a thing are compared."""

    VERTICAL = "vertical"
    HORIZONTAL = "horizontal"


Claim = tuple[str, Axis, int | None]
"""Thing, axis and sign: -1 for up or left, 0 for level, 1 for down or right, None for a contradiction."""

Claims = Counter[Claim]
"""How often a statement makes each claim."""

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
_LETTER = r"[^\W\d_]"
# between the words of a name, as in "red key" and box_1
_BETWEEN = r"[\s_-]+"
# a longer list of things only repeats itself
_MAX_THINGS = 64


def relations_text(relations: Iterable[Relation]) -> str:
    """Return relations in words, as demonstrations state them.

    >>> relations_text([("goal", 2, -1), ("hole", 0, 1), ("target", 0, 0)])
    'goal Down Left hole Right target here'
    """
    phrases = []
    for name, *offsets in relations:
        directions = [
            _WORDS[axis, sign(offset)] for axis, offset in zip(Axis, offsets, strict=True) if offset
        ]
        phrases.append(" ".join([name, *(directions or ["here"])]))
    return " ".join(phrases)


def read_claims(text: str, names: Sequence[str]) -> Claims:
    """Return the claims of a statement. Words that are neither a thing nor a direction are ignored.

    Args:
        text: Any text.
        names: Things of the environment, of one or several words; plurals are read as singulars.

    >>> sorted(read_claims("The goal is below, to the left; no dragons.", ["goal"]))
    [('goal', <Axis.HORIZONTAL: 'horizontal'>, -1), ('goal', <Axis.VERTICAL: 'vertical'>, 1)]
    """
    claims: Claims = Counter()
    for name, signs in _things(text, names):
        for axis in Axis:
            sign_or_none = None if len(signs[axis]) > 1 else next(iter(signs[axis]), 0)
            claims[name, axis, sign_or_none] += 1
    return claims


def _things(text: str, names: Sequence[str]) -> list[tuple[str, dict[Axis, set[int]]]]:
    """Return the things that a text names, each with the signs of the direction words that follow it."""
    pattern, spelled = _pattern_of(tuple(names))
    things: list[tuple[str, dict[Axis, set[int]]]] = []
    for found in pattern.finditer(text.casefold()):
        word = found[0]
        if found["thing"] is not None:
            if len(things) == _MAX_THINGS:
                break
            name = spelled[_spelling(found["thing"])]
            things.append((name, {axis: set() for axis in Axis}))
        elif word in _DIRECTIONS and things:
            axis, direction = _DIRECTIONS[word]
            things[-1][1][axis].add(direction)
    return things


@lru_cache
def _pattern_of(names: tuple[str, ...]) -> tuple[re.Pattern[str], dict[str, str]]:
    """Return a pattern that finds things, by any number of words each, and other words; and things by spelling."""
    spelled = {_spelling(name): name for name in names}
    spelled.pop("", None)
    longest_first = sorted(spelled, key=len, reverse=True)
    words = [map(re.escape, spelling.split()) for spelling in longest_first]
    things = "|".join(map(_BETWEEN.join, words)) or "(?!)"
    # no part of a word or of a number
    border = r"(?!(?<=\d)\d)"
    return re.compile(
        rf"(?<!{_LETTER}){border}(?P<thing>{things})(?:s|es)?(?!{_LETTER}){border}|{_LETTER}+"
    ), spelled


def _spelling(name: str) -> str:
    """Return the words of a name with blanks between them."""
    return " ".join(re.split(_BETWEEN, name.casefold())).strip()


def true_claims(relations: Iterable[Relation]) -> Claims:
    """Return the claims of a statement that names exactly these relations."""
    claims: Claims = Counter()
    for name, rows, columns in relations:
        claims[name, Axis.VERTICAL, sign(rows)] += 1
        claims[name, Axis.HORIZONTAL, sign(columns)] += 1
    return claims


def f1_score(predicted: Claims, target: Claims) -> float:
    """Return the harmonic mean of precision and recall; 0 without a claim.

    `2 |predicted ∩ target| / (|predicted| + |target|)`, counted with repetition.

    >>> target = true_claims([("goal", 1, -1)])
    >>> [f1_score(read_claims(text, ["goal"]), target) for text in ("goal Down Left", "goal Up Left")]
    [1.0, 0.5]
    """
    if not predicted:
        return 0.0
    return 2 * (predicted & target).total() / (predicted.total() + target.total())


def sign(number: int) -> int:
    """Return -1, 0 or 1."""
    return (number > 0) - (number < 0)


def judged_statements(
    texts: Mapping[str, str], relations: Mapping[str, list[Relation]], *, names: tuple[str, ...]
) -> list[Statement]:
    """Return the statements of a response with the true relations and their agreement with these.

    Args:
        texts: Text of each block with statements.
        relations: Relations `before` and `after` the response's actions.
        names: All things that may be named; empty for those that stood there before.
    """
    names = names or tuple(dict.fromkeys(name for name, *_ in relations["before"]))
    statements = []
    for block, text in texts.items():
        true = relations[BLOCKS[block].state or "before"]
        agreement = f1_score(read_claims(text, names), true_claims(true))
        statements.append(
            Statement(block=block, text=text, true_relations=true, names=names, agreement=agreement)
        )
    return statements
