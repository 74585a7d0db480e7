"""Results of agent programs: rewards, success and further information, as a program or its verifier reports them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import TypedDict

from ragen_pl.agent_programs.serving.rewards import ResponseRewards, reward_parts
from ragen_pl.agent_programs.serving.strict_json import strict_json
from ragen_pl.base.typed_json import TypeFault, typed
from ragen_pl.trajectory import REWARD_PART

# of a result, which is read while other programs wait
_MAX_VALUES = 100_000
# characters of the JSON of `info`, which the trainer keeps with the trajectory
_MAX_INFO = 1 << 20


class _Result(TypedDict, total=False):
    reward: Any
    success: bool
    # names with lone surrogates have errors of their own
    rewards: dict[Any, Any]
    invalid: list[Any]
    info: dict[Any, Any]


@dataclass(kw_only=True, slots=True)
class ProgramResult:
    """Result of an episode.

    Attributes:
        parts: Parts of the reward at the end by name; a reward without parts is `program`.
        success: Whether the task was solved.
        rewards_of: Reward terms by number of the turn.
        invalid_turns: Numbers of turns that are not valid.
        info: Further information, for the trajectory.
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
        posted: Rewards set over HTTP.
        call_ids: Ids of the responses that were delivered, in order.

    Raises:
        ValueError: There is no reward, a number is not finite, an id is not known, two rewards of a response differ, or
            it is what a request must not be either: nested too deeply, or with a lone surrogate.
    """
    result = ProgramResult()
    turns = {call_id: number for number, call_id in enumerate(call_ids)}
    if text is None and not posted:
        raise ValueError(
            'the program reported no result; write JSON such as {"reward": 1.0, "success": true} to the file '
            "$RAGEN_RESULT, return it from the function, or set env.verifier"
        )
    given = _Result() if text is None else _object(text)
    rewards = ResponseRewards(posted)
    for call_id, reward in given.get("rewards", {}).items():
        _turn(turns, call_id)
        rewards.give(call_id, reward)
    for call_id, parts in rewards.items():
        terms = {REWARD_PART + name: value for name, value in parts.items()}
        result.rewards_of[_turn(turns, call_id)] = terms
    result.parts = reward_parts(given.get("reward", 0.0), "result: reward")
    result.success = given.get("success", False)
    result.invalid_turns = [_turn(turns, call_id) for call_id in given.get("invalid", [])]
    result.info = dict(given.get("info", {}))
    if text is not None:
        _check_whole(text)
    if len(json.dumps(result.info)) > _MAX_INFO:
        raise ValueError(f"result: info has more than {_MAX_INFO} characters")
    return result


def _object(text: str) -> _Result:
    if sum(map(text.count, ",[{")) > _MAX_VALUES:
        raise ValueError(f"result: it has more than {_MAX_VALUES} values")
    try:
        given = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"result: no JSON ({error}): {_shown(text)!r}") from error
    try:
        result = typed(_Result, given)
    except TypeFault as fault:
        raise ValueError(f"result: {fault}") from None
    if unknown := given.keys() - _Result.__annotations__.keys():
        known = ", ".join(_Result.__annotations__)
        raise ValueError(f"result: {_shown(min(unknown))} is not known; known are {known}")
    return result


def _check_whole(text: str) -> None:
    """Check what rewards have no part in, as requests are: the trainer writes it into its records.

    Raises:
        ValueError: A number is not finite, it is nested too deeply, or it holds a lone surrogate.
    """
    try:
        strict_json(text)
    # such an error cannot be shown itself
    except UnicodeEncodeError as error:
        raise ValueError("result: it holds a lone surrogate, which is no character") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"result: {error}") from error


def _shown(text: str) -> str:
    """Return a text that can be written, as long as an error may be."""
    return text[:100].encode("ascii", "backslashreplace").decode()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object whose names are given once; of two rewards the last one would count."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(
            name for name, count in Counter(name for name, _ in pairs).items() if count > 1
        )
        raise ValueError(f"{_shown(twice)!r} is given twice")
    return found


def _turn(turns: Mapping[str, int], call_id: object) -> int:
    if not isinstance(call_id, str) or call_id not in turns:
        raise ValueError(
            f"result: {call_id!r:.100} is the id of no response of this episode, which has {len(turns)}"
        )
    return turns[call_id]
