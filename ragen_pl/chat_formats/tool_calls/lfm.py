"""Calls between `<|tool_call_start|>` and `<|tool_call_end|>`, as LFM2 writes them.

The calls of a turn are a list in Python's syntax, `[f(a='x', b=[1]), g()]`, with literals of JSON's types as arguments,
all by name. If one call is malformed, all are.
"""

from __future__ import annotations

import re
from typing import Any

from ragen_pl.chat_formats.tool_calls.scanned import ScannedText
from ragen_pl.chat_formats.tool_calls.syntax import MarkedCalls, NamedArguments, Tools, expect
from ragen_pl.chat_formats.tool_calls.values import PYTHON, Malformed, after_blanks, read_value

_NAME = re.compile("[^\\s()\\[\\]{}<>=,'\"\ud800-\udfff]+")


def _read_inside(
    scanned: ScannedText, start: int, tools: Tools
) -> tuple[list[NamedArguments], int]:
    text = scanned.text
    calls: list[NamedArguments] = []
    position = after_blanks(text, expect(text, start, "["))
    while True:
        name, position = _read_name(text, position)
        arguments, position = _read_arguments(text, after_blanks(text, position))
        calls.append((name, arguments))
        position = after_blanks(text, position)
        if not text.startswith(",", position):
            return calls, expect(text, position, "]")
        position = after_blanks(text, position + 1)


def _read_arguments(text: str, start: int) -> tuple[dict[str, Any], int]:
    """Read the arguments that begin with a parenthesis at `start`; return them and the position after them."""
    arguments: dict[str, Any] = {}
    position = after_blanks(text, expect(text, start, "("))
    if text.startswith(")", position):
        return arguments, position + 1
    while True:
        name, end = _read_name(text, position)
        if name in arguments:
            raise Malformed(f"duplicate argument {name[:40]!r}", position)
        value = expect(text, after_blanks(text, end), "=")
        arguments[name], position = read_value(text, value, PYTHON)
        position = after_blanks(text, position)
        if not text.startswith(",", position):
            return arguments, expect(text, position, ")")
        position = after_blanks(text, position + 1)


def _read_name(text: str, position: int) -> tuple[str, int]:
    match = _NAME.match(text, position)
    if match is None:
        raise Malformed("no name", position)
    return match.group(), match.end()


LFM = MarkedCalls(
    opening="<|tool_call_start|>", closing="<|tool_call_end|>", read_inside=_read_inside
)
