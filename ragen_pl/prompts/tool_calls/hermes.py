"""Calls as JSON between `<tool_call>` and `</tool_call>`, as Qwen 2.5 and Qwen3 write them."""

from __future__ import annotations

from typing import Any

from ragen_pl.prompts.tool_calls.scanned import ScannedText
from ragen_pl.prompts.tool_calls.syntax import MarkedCalls, NamedArguments, Tools
from ragen_pl.prompts.tool_calls.values import JSON, Malformed, read_value


def named_arguments(value: Any, position: int, *, key: str) -> NamedArguments:
    """Return name and arguments of a call's JSON object.

    Args:
        value: the object, read as JSON.
        position: where it stands in the text.
        key: the object's key for the arguments, beside `name`.

    Raises:
        Malformed: if it is another object or value.
    """
    if not isinstance(value, dict) or set(value) != {"name", key}:
        raise Malformed(f"not an object of name and {key}", position)
    if not isinstance(value["name"], str) or not value["name"]:
        raise Malformed("name is not a string or empty", position)
    if not isinstance(value[key], dict):
        raise Malformed(f"{key} is not an object", position)
    return value["name"], value[key]


def _read_inside(
    scanned: ScannedText, start: int, tools: Tools
) -> tuple[list[NamedArguments], int]:
    value, end = read_value(scanned.text, start, JSON)
    return [named_arguments(value, start, key="arguments")], end


HERMES = MarkedCalls(opening="<tool_call>", closing="</tool_call>", read_inside=_read_inside)
