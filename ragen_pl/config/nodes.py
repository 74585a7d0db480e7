"""Nodes of settings: their plain values, and each setting in them by its full name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import ListConfig, OmegaConf

# those without and with lists
_GROUPS = ((Mapping,), (Mapping, list, ListConfig))


def plain(node: Any, *, resolve: bool = True, throw_on_missing: bool = False) -> dict[str, Any]:
    """Return a node as plain dictionaries and lists, an empty one for null.

    Args:
        node: The node.
        resolve: Whether references become the values that they refer to.
        throw_on_missing: Whether a missing value (`???`) is an error.
    """
    if node is None:
        return {}
    values: Any = OmegaConf.to_container(node, resolve=resolve, throw_on_missing=throw_on_missing)
    return {str(name): value for name, value in values.items()}


def nodes(values: Any, *, prefix: str = "", lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the full name and value of every setting and group, each group before what is in it.

    Args:
        values: A group of settings, or a list.
        prefix: What comes before the names.
        lists: Whether lists are groups, whose items are named by their index.
    """
    for name, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        yield f"{prefix}{name}", value
        if isinstance(value, _GROUPS[lists]):
            yield from nodes(value, prefix=f"{prefix}{name}.", lists=lists)


def leaves(values: Any, *, prefix: str = "", lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield those of `nodes` that have none in them: settings, and empty groups.

    >>> dict(leaves({"a": {"b": [1, 2]}, "c": {}})), dict(leaves({"a": {"b": [1, 2]}}, lists=False))
    ({'a.b.0': 1, 'a.b.1': 2, 'c': {}}, {'a.b': [1, 2]})
    """
    for name, value in nodes(values, prefix=prefix, lists=lists):
        if not (isinstance(value, _GROUPS[lists]) and value):
            yield name, value
