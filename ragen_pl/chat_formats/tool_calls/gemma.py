"""Calls between `<|tool_call>` and `<tool_call|>`, as Gemma 4 writes them.

A call is `call:name{key:value}`: JSON whose names have no quotes and whose strings stand between two `<|"|>`, a
control token, with no escapes. A string cannot hold that token.
"""

from __future__ import annotations

import re

from ragen_pl.chat_formats.tool_calls.scanned import ScannedText
from ragen_pl.chat_formats.tool_calls.syntax import MarkedCalls, NamedArguments, Tools, expect
from ragen_pl.chat_formats.tool_calls.values import (
    JSON,
    Malformed,
    Notation,
    read_value,
    refuse_surrogates,
)

_QUOTE = '<|"|>'
_NAME = re.compile("[^\\s{}<>\ud800-\udfff]+")


def _read_string(text: str, start: int, quote: str) -> tuple[str, int]:
    inside = start + len(quote)
    end = text.find(quote, inside)
    if end < 0:
        raise Malformed("string without end", start)
    refuse_surrogates(text, inside, end)
    return text[inside:end], end + len(quote)


_VALUES = Notation(
    name="Gemma's notation",
    quotes=(_QUOTE,),
    read_string=_read_string,
    # The first templates write a missing value as Python does.
    words={**JSON.words, "None": None},
    bare_names=re.compile("[^\\s:,{}\\[\\]<>\ud800-\udfff][^:,{}\\[\\]<>\n\ud800-\udfff]*"),
)


def _read_inside(
    scanned: ScannedText, start: int, tools: Tools
) -> tuple[list[NamedArguments], int]:
    name = _NAME.match(scanned.text, expect(scanned.text, start, "call:"))
    if name is None:
        raise Malformed("no name", start + len("call:"))
    expect(scanned.text, name.end(), "{")
    arguments, end = read_value(scanned.text, name.end(), _VALUES)
    return [(name.group(), arguments)], end


GEMMA = MarkedCalls(opening="<|tool_call>", closing="<tool_call|>", read_inside=_read_inside)
