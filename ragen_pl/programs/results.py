"""Results of agent programs: rewards, success and further information, as a program or its verifier reports them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragen_pl.serving.rewards import ResponseRewards, reward_parts
from ragen_pl.trajectory import REWARD_PART

_KNOWN = ("reward", "success", "rewards", "invalid", "info")


@dataclass(kw_only=True, slots=True)
class ProgramResult:
    """Result of an episode.

    Attributes:
        parts: parts of the reward at the end by name; a reward without parts is `program`.
        success: whether the task was solved.
        rewards_of: reward terms by number of the turn.
        invalid_turns: numbers of turns that are not valid.
        info: further information, for the trajectory.
    """

    parts: dict[str, float] = field(default_factory=dict)
    success: bool = False
    rewards_of: dict[int, dict[str, float]] = field(default_factory=dict)
    invalid_turns: list[int] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)


def read_result(
    text: str | None, *, posted: ResponseRewards, call_ids: Sequence[str]
) -> ProgramResult:
    """Return the result of an episode.

    Args:
        text: JSON, `{"reward": number or {part: number}, "success": bool, "rewards": {id of a response: number or
            {part: number}}, "invalid": [ids], "info": {…}}`; None without any.
        posted: rewards set over HTTP.
        call_ids: ids of the responses that were delivered, in order.

    Raises:
        ValueError: there is no reward, a number is not finite, an id is not known, or two rewards of a response differ.
    """
    result = ProgramResult()
    turns = {call_id: number for number, call_id in enumerate(call_ids)}
    if text is None and not posted:
        raise ValueError(
            'the program reported no result; write JSON such as {"reward": 1.0, "success": true} to the file '
            "$RAGEN_RESULT, return it from the function, or set env.verifier"
        )
    given = {} if text is None else _object(text)
    rewards = ResponseRewards(posted)
    for call_id, reward in given.get("rewards", {}).items():
        rewards.give(call_id, reward)
    for call_id, parts in rewards.items():
        terms = {REWARD_PART + name: value for name, value in parts.items()}
        result.rewards_of[_turn(turns, call_id)] = terms
    result.parts = reward_parts(given.get("reward", 0.0), "result: reward")
    success = given.get("success", False)
    if not isinstance(success, bool):
        raise ValueError(f"result: success={success!r}, expected true or false")
    result.success = success
    result.invalid_turns = [_turn(turns, call_id) for call_id in given.get("invalid", [])]
    result.info = dict(given.get("info", {}))
    return result


def _object(text: str) -> Mapping[str, Any]:
    try:
        given = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"result: no JSON ({error})") from error
    if not isinstance(given, Mapping):
        raise ValueError(f"result: found {type(given).__name__}, expected an object")
    if unknown := given.keys() - set(_KNOWN):
        raise ValueError(f"result: {min(unknown)} is not known; known are {', '.join(_KNOWN)}")
    for name, kind in (("rewards", Mapping), ("info", Mapping), ("invalid", list)):
        if not isinstance(given.get(name, kind() if kind is list else {}), kind):
            raise ValueError(f"result: {name} has the wrong type")
    return given


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object whose names are given once; of two rewards the last one would count."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is given twice")
    return found


def _turn(turns: Mapping[str, int], call_id: object) -> int:
    if call_id not in turns:
        raise ValueError(
            f"result: {call_id!r} is the id of no response of this episode, which has {len(turns)}"
        )
    return turns[str(call_id)]
