"""JSON of a client, with finite numbers, whole characters and limits of its depth and of the number of its values."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 64
MAX_VALUES = 250_000
"""Largest number of values, which are counted before any is made."""


def strict_json(data: bytes | str) -> Any:
    """Return a JSON value.

    Raises:
        ValueError: It is none, has too many values, is nested too deeply, or holds NaN, infinity or a lone surrogate.
        RecursionError: It is nested far too deeply.
    """
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
    if has_more_values(text, MAX_VALUES):
        raise ValueError(f"it has more than {MAX_VALUES} values")
    value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    if "\\u" in text:
        # a lone surrogate cannot be encoded
        json.dumps(value, ensure_ascii=False).encode()
    _check_depth(value)
    return value


def has_more_values(text: str, limit: int) -> bool:
    """Return whether a text that is JSON has more values than a limit. An empty list or object counts twice."""
    return _count_signs(text) > limit and number_of_values(text, limit=limit) > limit


def number_of_values(text: str, *, limit: int) -> int:
    """Return the number of values of a text that is JSON by its signs, or a number above a limit; searches are in C."""
    # signs in strings are no values; a quote in a string stands behind a backslash
    unescaped = text.replace("\\\\", "").replace('\\"', "")
    # an object has two strings for a value, others have one at most
    if unescaped.count('"') // 2 > 2 * limit:
        return limit + 1
    return _count_signs("".join(unescaped.split('"')[::2]))


def _count_signs(text: str) -> int:
    """Return the number of values of JSON whose strings are empty: all but the first follow one of these signs."""
    return 1 + sum(map(text.count, ",[{"))


def _finite(text: str) -> float:
    """Return a number of JSON.

    Raises:
        ValueError: It is NaN or infinite, as 1e999 is.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def _check_depth(value: object) -> None:
    level: list[Any] = [value]
    if not isinstance(value, dict | list):
        return
    for _ in range(MAX_DEPTH):
        groups = [each.values() if isinstance(each, dict) else each for each in level]
        level = [item for group in groups for item in group if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
