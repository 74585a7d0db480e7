"""Tools of a request: their schemas, the choice among them, their calls, and results in the order of the calls.

Many chat templates show no ids: the policy knows by the order alone which result belongs to which call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import MinLen
from pydantic import Field
from typing_extensions import TypedDict

from ragen_pl.agent_programs.serving.errors import RequestError, unsupported
from ragen_pl.agent_programs.serving.strict_json import (
    MAX_VALUES,
    number_of_values,
    strict_json,
)
from ragen_pl.base.typed_json import shown

MAX_TOOLS = 128
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class _CalledFunction(TypedDict):
    name: _Name
    arguments: NotRequired[str | dict[str, Any] | None]


class ToolCall(TypedDict):
    """A call in an assistant's message."""

    id: Annotated[str, MinLen(1)]
    function: _CalledFunction


class _Function(TypedDict):
    name: _Name
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class Tool(TypedDict):
    """A tool that a request offers."""

    type: Literal["function"]
    function: _Function


def read_tools(given: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the schemas of tools.

    Raises:
        RequestError: Two have the same name.
    """
    tools = [_tool(tool["function"]) for tool in given]
    names = [tool["function"]["name"] for tool in tools]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise RequestError(
                400,
                f"tools[{number}].function.name={name!r}: another tool has this name; give each its own",
            )
    return tools


def _tool(function: _Function) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": function.get("description") or "",
            "parameters": function.get("parameters") or {"type": "object", "properties": {}},
        },
    }


def read_tool_choice(given: str | dict[str, Any], tools: list[dict[str, Any]]) -> object:
    """Return which tools a response is to call: `auto`, `none`, `required`, or an object that names one.

    Raises:
        RequestError: It is no such choice.
    """
    if given in ("auto", "none"):
        return given
    if not tools:
        raise RequestError(400, f"tool_choice={shown(given)}: the request has no tools; send some")
    if isinstance(given, str):
        return given
    if given.get("type") != "function":
        raise unsupported("tool_choice", given, "send auto, none, required or a function")
    # the Responses API has the name beside the type
    function = given.get("function", given)
    name = function.get("name") if isinstance(function, Mapping) else None
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise RequestError(
            400, f"tool_choice={shown(given)}: the request has no tool {shown(name)}"
        )
    return given


class CallReader:
    """Reads the tool calls of a request, whose arguments have a limited number of values together."""

    def __init__(self) -> None:
        self._values = 0

    def read(self, where: str, given: ToolCall) -> dict[str, Any]:
        """Return a call as `ChatRequest.messages` has it.

        Raises:
            RequestError: The arguments of all calls so far have too many values.
        """
        function = given["function"]
        arguments = self._arguments(where, function.get("arguments"))
        return {"id": given["id"], "name": function["name"], "arguments": arguments}

    def _arguments(self, where: str, given: str | dict[str, Any] | None) -> Any:
        """Return the arguments of a call as an object, or as text where they are none."""
        if not given:
            return {}
        if not isinstance(given, str):
            return given
        self._values += number_of_values(given, limit=MAX_VALUES)
        if self._values > MAX_VALUES:
            raise RequestError(
                400,
                f"{where}.tool_calls: the arguments of the calls so far have more than {MAX_VALUES} values together",
            )
        try:
            read = strict_json(given)
        except (ValueError, RecursionError):
            return given
        return read if isinstance(read, dict) else given


def in_order_of_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with a result for each call, in the order of the calls, and with the names of the tools.

    Args:
        messages: Messages as `ChatRequest` has them. The results of a message's calls follow it at once, in any order.

    Raises:
        RequestError: A call has no result, a result has no call, or two of a message have the same id.
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
