"""Kinds of failed episodes: the reason why a recorded episode did not succeed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ragen_pl.base.instances import instances

SUCCESS = "success"
KINDS = (
    "environment failed",
    "truncated",
    "length limit",
    "invalid action",
    "repeated state",
    "no effect",
    "ended without success",
)
"""Kinds of failures, in the order in which they are looked for."""


def kind_of(record: Mapping[str, Any]) -> str:
    """Return `success`, or the first of `KINDS` that an episode shows.

    `length limit` and `invalid action` are those of the last response. A state is repeated if the agent sees the same
    observation a third time. `no effect` is an episode in which most valid actions changed nothing.

    Args:
        record: An episode as `ragen_pl.base.records` writes it. It may be somebody else's.

    >>> turn = {"valid": True, "effective": True, "observation": "ice", "images": []}
    >>> kind_of({"success": False, "turns": [turn | {"valid": False}]})
    'invalid action'
    >>> kind_of({"success": False, "turns": [turn, turn, turn]})
    'repeated state'
    """
    if record.get("success"):
        return SUCCESS
    turns = record.get("turns")
    turns = instances(turns, dict) if isinstance(turns, list) else []
    last = turns[-1] if turns else {}
    seen = Counter(str((turn.get("observation"), turn.get("images"))) for turn in turns)
    valid = [turn for turn in turns if turn.get("valid")]
    idle = sum(not turn.get("effective") for turn in valid)
    found = (
        record.get("status") == "failed",
        record.get("status") == "truncated",
        bool(last.get("hit_length_limit")),
        bool(turns) and not last.get("valid"),
        max(seen.values(), default=0) > 2,
        2 * idle > len(valid),
        True,
    )
    return KINDS[found.index(True)]


def count_kinds(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of episodes of each kind, `success` first, without kinds that do not occur."""
    counts = Counter(map(kind_of, records))
    return {kind: counts[kind] for kind in (SUCCESS, *KINDS) if counts[kind]}
