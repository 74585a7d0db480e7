"""Results of agent programs: rewards, success and further information, as a program or its verifier reports them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    text: str | None, *, posted: Iterable[tuple[str, Any]], call_ids: Sequence[str]
) -> ProgramResult:
    """Return the result of an episode.

    Args:
        text: JSON, `{"reward": number or {part: number}, "success": bool, "rewards": {id of a response: number or
            {part: number}}, "invalid": [ids], "info": {…}}`; None without any.
        posted: rewards set over HTTP, with the ids of their responses.
        call_ids: ids of the responses that were delivered, in order.

    Raises:
        ValueError: there is no reward, a number is not finite, or an id is not known.
    """
    result = ProgramResult()
    turns = {call_id: number for number, call_id in enumerate(call_ids)}
    posted = [*posted]
    if text is None and not posted:
        raise ValueError(
            'the program reported no result; write JSON such as {"reward": 1.0, "success": true} to the file '
            "$RAGEN_RESULT, return it from the function, or set env.verifier"
        )
    given = {} if text is None else _object(text)
    for call_id, reward in [*given.get("rewards", {}).items(), *posted]:
        terms = result.rewards_of.setdefault(_turn(turns, call_id), {})
        for name, value in _parts(reward, f"rewards[{call_id}]").items():
            term = REWARD_PART + name
            terms[term] = terms.get(term, 0.0) + value
    result.parts = _parts(given.get("reward", 0.0), "reward")
    success = given.get("success", False)
    if not isinstance(success, bool):
        raise ValueError(f"result: success={success!r}, expected true or false")
    result.success = success
    result.invalid_turns = [_turn(turns, call_id) for call_id in given.get("invalid", [])]
    result.info = dict(given.get("info", {}))
    return result


def _object(text: str) -> Mapping[str, Any]:
    try:
        given = json.loads(text)
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


def _turn(turns: Mapping[str, int], call_id: object) -> int:
    if call_id not in turns:
        raise ValueError(
            f"result: {call_id!r} is the id of no response of this episode, which has {len(turns)}"
        )
    return turns[str(call_id)]


def _parts(reward: object, name: str) -> dict[str, float]:
    given = reward if isinstance(reward, Mapping) else {"program": reward}
    parts: dict[str, float] = {}
    for part, value in given.items():
        number = value if isinstance(value, int | float) else math.nan
        amount = math.nan if isinstance(value, bool) else float(number)
        if not math.isfinite(amount):
            raise ValueError(f"result: {name} has {part}={value!r}, expected a finite number")
        parts[str(part)] = amount
    return parts
