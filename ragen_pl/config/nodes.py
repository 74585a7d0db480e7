"""Nodes of settings: their plain values, and each setting in them by its full name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import ListConfig, OmegaConf


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


def leaves(values: Any, *, prefix: str = "", lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the full name and value of every setting; an empty group is one.

    Args:
        values: A group of settings, or a list.
        prefix: What comes before the names.
        lists: Whether items of a list are settings, named by their index.

    >>> dict(leaves({"a": {"b": [1, 2]}, "c": {}})), dict(leaves({"a": {"b": [1, 2]}}, lists=False))
    ({'a.b.0': 1, 'a.b.1': 2, 'c': {}}, {'a.b': [1, 2]})
    """
    groups = (Mapping, list, ListConfig) if lists else (Mapping,)
    for name, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        if isinstance(value, groups) and value:
            yield from leaves(value, prefix=f"{prefix}{name}.", lists=lists)
        else:
            yield f"{prefix}{name}", value
