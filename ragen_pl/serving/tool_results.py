"""Results of tool calls in the order of the calls.

Many chat templates show no ids: the policy knows by the order alone which result belongs to which call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragen_pl.serving.errors import RequestError, shown


def in_order_of_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with a result for each call, in the order of the calls, and with the names of the tools.

    Args:
        messages: messages as `ChatRequest` has them. The results of a message's calls follow it at once, in any order.

    Raises:
        RequestError: a call has no result, a result has no call, or two of a message have the same id.
    """
    ordered: list[dict[str, Any]] = []
    # names of the tools and results by the ids of the latest message's calls
    names: Mapping[str, str] = {}
    results: dict[str, dict[str, Any]] = {}
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if message["role"] == "tool":
            _check_result(message["tool_call_id"], names, results, place=place)
            results[message["tool_call_id"]] = message
            continue
        ordered += [*_matched(names, results, before=place), message]
        names, results = _names(message, place=place), {}
    return [*ordered, *_matched(names, results, before="the end")]


def _names(message: Mapping[str, Any], *, place: str) -> Mapping[str, str]:
    """Return the names of the tools that a message calls, by the ids of the calls."""
    names: dict[str, str] = {}
    for call in message.get("tool_calls", ()):
        if call["id"] in names:
            raise RequestError(
                400,
                f"{place}.tool_calls: two calls have the id {shown(call['id'])}; give each call its own",
            )
        names[call["id"]] = call["name"]
    return names


def _check_result(
    call_id: str, names: Mapping[str, str], results: Mapping[str, object], *, place: str
) -> None:
    found = f"{place}.tool_call_id={shown(call_id)}"
    if call_id not in names:
        known = f"its calls are {shown([*names])}" if names else "it has no calls"
        raise RequestError(
            400,
            f"{found}: no such call in the message before the results, {known}; send results right after the message "
            "with their calls",
        )
    if call_id in results:
        raise RequestError(400, f"{found}: a second result of this call; send one")


def _matched(
    names: Mapping[str, str], results: Mapping[str, dict[str, Any]], *, before: str
) -> list[dict[str, Any]]:
    """Return the results of calls, in the order of the calls."""
    for call_id in names:
        if call_id not in results:
            raise RequestError(
                400,
                f"messages: the tool call with the id {shown(call_id)} has no result before {before}; send a tool "
                "message for each call right after the message with the calls",
            )
    return [results[call_id] | {"name": name} for call_id, name in names.items()]
