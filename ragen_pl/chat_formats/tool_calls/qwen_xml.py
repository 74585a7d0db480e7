"""Calls as XML elements between `<tool_call>` and `</tool_call>`, as Qwen3.5 and later models write them.

A value is the text between its tags, without the line break that the template writes after the opening tag and before
the closing one. It cannot hold `</parameter>`. Its type is that of the parameter in the tool's JSON schema. A schema
without `type` has those of its values and of its keywords, such as `minItems` of an array (JSON Schema 2020-12).
Where it says none, the value is the text, also where this could be read as JSON: servers of these models do the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ragen_pl.base.instances import instances
from ragen_pl.chat_formats.tool_calls.scanned import ScannedText
from ragen_pl.chat_formats.tool_calls.syntax import MarkedCalls, NamedArguments, Tools, expect
from ragen_pl.chat_formats.tool_calls.values import (
    JSON,
    Malformed,
    after_blanks,
    read_value,
    refuse_surrogates,
)

_NAME = re.compile("[^<>\n\ud800-\udfff]+")
_CLOSING = "</parameter>"
# Templates before that of Qwen3.8 write words as Python does.
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def _read_inside(
    scanned: ScannedText, start: int, tools: Tools
) -> tuple[list[NamedArguments], int]:
    text = scanned.text
    name, position = _read_tag(text, start, "<function=")
    schema = tools.get(name, {})
    arguments: dict[str, Any] = {}
    position = after_blanks(text, position)
    while text.startswith("<parameter=", position):
        parameter, inside = _read_tag(text, position, "<parameter=")
        if parameter in arguments:
            raise Malformed(f"duplicate parameter {parameter[:40]!r}", position)
        end = scanned.find(_CLOSING, inside)
        if end == len(text):
            raise Malformed(f"no {_CLOSING}", inside)
        refuse_surrogates(text, inside, end)
        value = text[inside:end].removeprefix("\n").removesuffix("\n")
        arguments[parameter] = _typed(value, _types(_parameter(schema, parameter), schema))
        position = after_blanks(text, end + len(_CLOSING))
    return [(name, arguments)], expect(text, position, "</function>")


def _read_tag(text: str, start: int, opening: str) -> tuple[str, int]:
    """Return the name in a tag such as `<function=name>`, and the position after the tag."""
    match = _NAME.match(text, expect(text, start, opening))
    if match is None:
        raise Malformed("no name", start + len(opening))
    return match.group(), expect(text, match.end(), ">")


def _parameter(schema: Mapping[str, Any], name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def _types(parameter: Any, schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a parameter's schema allows; empty if it does not say."""
    types: set[str] = set()
    unread, read = [parameter], set()
    while unread:
        part = unread.pop()
        if not isinstance(part, Mapping) or id(part) in read:
            continue
        read.add(id(part))
        declared = part.get("type")
        names = declared if isinstance(declared, list | tuple) else [declared]
        types |= set(instances(names, str)) or _implied(part)
        if part.get("nullable") is True:
            types.add("null")
        for union in ("anyOf", "oneOf", "allOf"):
            choices = part.get(union)
            unread += choices if isinstance(choices, list | tuple) else []
        unread.append(_referenced(part.get("$ref"), schema))
    return types


def _implied(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema without `type` describes: those of its values and of its keywords."""
    types = {kind for kind, keywords in _KEYWORDS.items() if keywords & schema.keys()}
    values = schema.get("enum")
    for value in [*(values if isinstance(values, list | tuple) else []), schema.get("const", "")]:
        types |= _NAMES_OF_TYPES.get(type(value), set())
    return types


def _referenced(reference: Any, schema: Mapping[str, Any]) -> Any:
    """Return the schema that a reference such as `#/$defs/name` names, None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    place: Any = schema
    for part in reference[2:].split("/"):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place


def _typed(text: str, types: set[str]) -> Any:
    """Return a value in one of the types, the text itself if it is of none of them."""
    if not types - {"string"}:
        return text
    word = text.strip()
    if word in _PYTHON_WORDS:
        value: Any = _PYTHON_WORDS[word]
    else:
        try:
            value, end = read_value(text, 0, JSON)
        except Malformed:
            return text
        if after_blanks(text, end) != len(text):
            return text
    if isinstance(value, float) and "number" not in types and value.is_integer():
        value = int(value)  # an integer in the sense of JSON Schema
    return value if types & _NAMES_OF_TYPES[type(value)] else text


# keywords that say something of values of one type only
_KEYWORDS = {
    "object": {
        "properties", "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "required",
        "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
    },
    "array": {
        "items", "prefixItems", "unevaluatedItems", "contains", "minContains", "maxContains", "minItems", "maxItems",
        "uniqueItems",
    },
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "string": {"minLength", "maxLength", "pattern"},
}  # fmt: skip
_NAMES_OF_TYPES: dict[type, set[str]] = {
    bool: {"boolean"},
    dict: {"object"},
    float: {"number"},
    int: {"integer", "number"},
    list: {"array"},
    str: set(),  # a string stays as it is, quotes included
    type(None): {"null"},
}

QWEN_XML = MarkedCalls(opening="<tool_call>", closing="</tool_call>", read_inside=_read_inside)
