"""Descriptions of settings in the docstrings of their classes, for the page of keys."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

import griffe

from ragen_pl.config.signatures import definition_at

# gymnasium's documents of environments have lists
_LIST = re.compile(r"^## Arguments\n(.*?)(?=^##|\Z)", re.M | re.S)
_ITEM = re.compile(r"^- ((?:`\w+`(?:, )?)+): *((?:.*)(?:\n +.*)*)", re.M)
_DESCRIBING = (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes)


def description_of(name: str, targets: Iterable[str]) -> str:
    """Return the description of an argument or attribute in the first docstring that has one.

    Args:
        name: Its name.
        targets: Paths of the classes and functions that may describe it.
    """
    found = (_descriptions(target).get(name) for target in targets)
    return next(filter(None, found), "")


def summary_of(target: str) -> str:
    """Return the first sentence of the docstring of a class or function; empty without one."""
    paragraph = " ".join(_docstring(target).partition("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z`])", paragraph)[0]


@functools.cache
def _descriptions(target: str) -> Mapping[str, str]:
    """Return the descriptions of arguments and attributes in a docstring by name."""
    text = _docstring(target)
    sections = griffe.Docstring(text).parse("google", warnings=False)
    items = [item for section in sections if section.kind in _DESCRIBING for item in section.value]
    described = {item.name: item.description for item in items}
    for names, description in _ITEM.findall("".join(_LIST.findall(f"{text}\n"))):
        described |= dict.fromkeys(re.findall(r"\w+", names), description)
    return {name: " ".join(description.split()) for name, description in described.items()}


def _docstring(target: str) -> str:
    definition = definition_at(target)
    return definition.docstring.value if definition and definition.docstring else ""
