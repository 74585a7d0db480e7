"""Calls as JSON between `<tool_call>` and `</tool_call>`, as Qwen 2.5 and Qwen3 write them."""

from __future__ import annotations

from typing import Any

from ragen_pl.chat_formats.tool_calls.scanned import ScannedText
from ragen_pl.chat_formats.tool_calls.syntax import MarkedCalls, NamedArguments, Tools
from ragen_pl.chat_formats.tool_calls.values import JSON, Malformed, read_value


def named_arguments(value: Any, start: int, end: int, *, key: str) -> NamedArguments:
    """Return name and arguments of a call's JSON object.

    Args:
        value: The object, read as JSON.
        start: Where it begins in the text.
        end: Where it ends.
        key: The object's key for the arguments, beside `name`.

    Raises:
        Malformed: If it is another object or value.
    """
    if not isinstance(value, dict) or set(value) != {"name", key}:
        raise Malformed(f"not an object of name and {key}", start, reached=end)
    name, arguments = value["name"], value[key]
    if not isinstance(name, str) or not name:
        raise Malformed("name is not a string or empty", start, reached=end)
    if not isinstance(arguments, dict):
        raise Malformed(f"{key} is not an object", start, reached=end)
    return name, arguments


def _read_inside(
    scanned: ScannedText, start: int, tools: Tools
) -> tuple[list[NamedArguments], int]:
    value, end = read_value(scanned.text, start, JSON)
    return [named_arguments(value, start, end, key="arguments")], end


HERMES = MarkedCalls(opening="<tool_call>", closing="</tool_call>", read_inside=_read_inside)
