"""JSON of others, read by pydantic: values have exactly the types of the fields, and an error is one line."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from operator import itemgetter
from reprlib import Repr
from typing import Any, TypeVar

from pydantic import (
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import ErrorDetails

T = TypeVar("T")
FIRST_FAULT = Field(fail_fast=True)
"""Metadata of a list: the items behind a wrong one are not read, so that the work for an error is small."""


def _or_none(value: object, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError:
        return None


OR_NONE = WrapValidator(_or_none)
"""Metadata of a part that is read as None where it has another type."""

# of a value, among which the nearest one is looked for
_MOST_FAULTS = 100
_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 100
# expectations of pydantic's errors, in the words of the package's other messages
_EXPECTED: Mapping[str, str] = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "greater_than_equal": "at least {ge}",
    "int_type": "a whole number",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "missing": "a value",
    "model_attributes_type": "an object",
    "string_pattern_mismatch": "a text like {pattern}",
    "string_too_short": "at least {min_length} characters",
    "string_type": "a text",
    "too_long": "at most {max_length}",
    "too_short": "at least {min_length}",
    "union_tag_invalid": "one of {expected_tags}",
    "union_tag_not_found": "a text",
}


class TypeFault(ValueError):
    """The first fault of a value, as one line.

    Attributes:
        place: Where it is, such as `messages[3].content`; empty for the value itself.
        found: What is there; None where it is missing.
        expected: What was expected, in words.
        kind: Pydantic's type of the error.
    """

    def __init__(self, place: str, found: Any, expected: str, kind: str) -> None:
        is_long = kind in ("too_long", "too_short")
        line = f": found {len(found)}, expected" if is_long else f"={shown(found)}: expected"
        super().__init__(f"{place or 'value'}{line} {expected}")
        self.place, self.found, self.expected, self.kind = place, found, expected, kind


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # built when it is used: a program may read other JSON only
    return TypeAdapter(kind)


def typed(kind: type[T], value: object) -> T:
    """Return a value as a type has it: nothing is converted, and names without a field are left out.

    Args:
        kind: A type; a typed dictionary for an object, since instances of models take six times as long.
        value: A value of JSON.

    Raises:
        TypeFault: It has another type; for a union, the fault of the member that the value nearly is.
    """
    try:
        # mypy takes a class of typed dictionaries for not hashable
        result: T = _adapter(kind).validate_python(value, strict=True)  # type: ignore[arg-type]
        return result
    except ValidationError as error:
        faults = [_fault(each, value) for each in error.errors(include_url=False)[:_MOST_FAULTS]]
    place = faults[0][1].place
    inner = [each for each in faults if each[1].place.startswith(place)]
    nearness, nearest = max(inner, key=itemgetter(0))
    alike = [
        fault.expected for each, fault in inner if (each, fault.place) == (nearness, nearest.place)
    ]
    raise TypeFault(nearest.place, nearest.found, " or ".join(dict.fromkeys(alike)), nearest.kind)


def typed_or_none(kind: type[T], value: object) -> T | None:
    """Return a value as `typed` does, None where it has another type."""
    with suppress(ValidationError):
        found: T = _adapter(kind).validate_python(value, strict=True)  # type: ignore[arg-type]
        return found
    return None


def _fault(error: ErrorDetails, value: Any) -> tuple[tuple[int, bool], TypeFault]:
    """Return an error as a fault, after the depth of its place and whether the value has the right type there."""
    kind, context = error["type"], error.get("ctx", {})
    place, depth = "", 0
    for step in error["loc"]:
        # pydantic names the member of a union too, which is no step
        with suppress(TypeError, LookupError):
            value, depth = value[step], depth + 1
            place += f"[{step}]" if type(step) is int else f".{step:.100}"
    if kind in ("missing", "union_tag_invalid", "union_tag_not_found"):
        name = context["discriminator"][1:-1] if context else error["loc"][-1]
        place, value, depth = f"{place}.{name}", value.get(name), depth + 1
    words = _EXPECTED.get(kind, error["msg"]).format_map(context).replace("'", "")
    has_type = not kind.endswith("_type") and kind != "literal_error"
    return (depth, has_type), TypeFault(place.removeprefix("."), value, words, kind)


def shown(value: object) -> str:
    """Return a value for a message, shortened."""
    return _SHORT.repr(value)[:100]
