"""JSON of a client, with finite numbers, whole characters and a limit of its depth."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 64


def strict_json(data: bytes | str) -> Any:
    """Return a JSON value.

    Raises:
        ValueError: it is none, is nested too deeply, or holds NaN, infinity or half a surrogate pair.
        RecursionError: it is nested far too deeply.
    """
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
    value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    if "\\u" in text:
        # half a surrogate pair cannot be encoded
        json.dumps(value, ensure_ascii=False).encode()
    _check_depth(value)
    return value


def _finite(text: str) -> float:
    """Return a number of JSON.

    Raises:
        ValueError: it is NaN or infinite, as 1e999 is.
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
