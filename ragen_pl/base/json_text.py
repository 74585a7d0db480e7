"""JSON without NaN and infinity. Without torch: readers of records need it too."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def json_text(
    value: object,
    *,
    default: Callable[[Any], object] | None = None,
    digits: int | None = None,
    **settings: Any,
) -> str:
    """Return a value as JSON, with null for NaN and infinity, which JSON does not have.

    Args:
        value: A value of JSON's types.
        default: Function that turns other values into such ones; None to refuse them.
        digits: Significant digits that numbers with a fraction are rounded to; None for all.
        settings: Further arguments of `json.dumps`.

    >>> json_text({"loss": float("nan"), "rows": [1.5, float("-inf")]})
    '{"loss": null, "rows": [1.5, null]}'
    >>> json_text([2 / 3, 1.7976931348623157e308], digits=3)
    '[0.667, null]'
    """

    def converted(other: Any) -> object:
        assert default is not None
        return _without_non_finite(default(other), digits)

    convert = None if default is None else converted
    return json.dumps(
        _without_non_finite(value, digits), default=convert, allow_nan=False, **settings
    )


def _without_non_finite(value: object, digits: int | None) -> object:
    if isinstance(value, float):
        rounded = value if digits is None else float(f"{value:.{digits}g}")
        # the largest numbers may become infinite
        return rounded if math.isfinite(rounded) else None
    if isinstance(value, Mapping):
        return {name: _without_non_finite(item, digits) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(item, digits) for item in value]
    return value
