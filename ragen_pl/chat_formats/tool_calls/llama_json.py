"""Calls as bare JSON, as Llama 3.1 and 3.2 write them.

There are no markers but `<|python_tag|>`, which may stand before a call. An object is a call if it has a name and
parameters (or arguments, which models write too) and nothing else but a type; any other is text of the answer.
"""

from __future__ import annotations

import re
from typing import Any

from ragen_pl.chat_formats.tool_calls.hermes import named_arguments
from ragen_pl.chat_formats.tool_calls.scanned import ScannedText
from ragen_pl.chat_formats.tool_calls.syntax import CallBlock, Tools
from ragen_pl.chat_formats.tool_calls.values import JSON, Malformed, after_blanks, read_value

_TAG = "<|python_tag|>"
_LIKE_CALL = re.compile(r'\{[ \t\n\r]*"(?:name"|type"[ \t\n\r]*:[ \t\n\r]*"function")')
_KEYS = ("parameters", "arguments")


class LlamaJson:
    """The format `llama_json`."""

    def find(self, scanned: ScannedText, start: int) -> int:
        """Return the position of the next tag or brace."""
        return min(scanned.find(_TAG, start), scanned.find("{", start))

    def read(self, scanned: ScannedText, start: int, tools: Tools) -> CallBlock:
        """Read the object at a brace or after a tag."""
        text = scanned.text
        tagged = text.startswith(_TAG, start)
        inside = start + len(_TAG) if tagged else start
        brace = after_blanks(text, inside)
        try:
            value, end = read_value(text, brace, JSON)
        except Malformed as fault:
            if tagged or _LIKE_CALL.match(text, brace):
                raise
            return CallBlock(calls=[], inside=(start, start), end=max(fault.reached, start + 1))
        keys = [key for key in _KEYS if _is_call(value, key)]
        if not keys and not tagged:
            return CallBlock(calls=[], inside=(start, start), end=end)
        key = keys[0] if keys else _KEYS[0]
        if isinstance(value, dict) and value.get("type") == "function":
            value = {name: item for name, item in value.items() if name != "type"}
        return CallBlock(
            calls=[named_arguments(value, brace, end, key=key)], inside=(inside, end), end=end
        )

    def end_of_malformed(self, scanned: ScannedText, position: int) -> int:
        """Return where the next call may begin."""
        return self.find(scanned, position)


def _is_call(value: Any, key: str) -> bool:
    return isinstance(value, dict) and set(value) - {"type"} == {"name", key}


LLAMA_JSON = LlamaJson()
