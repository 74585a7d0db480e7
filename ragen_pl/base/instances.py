"""Those of some objects that are of a class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def instances(objects: Iterable[object], kind: type[T]) -> list[T]:
    """Return the objects that are of a class, or follow a protocol, in order.

    >>> instances([1, "a", 2.0, "b"], str)
    ['a', 'b']
    """
    return [one for one in objects if isinstance(one, kind)]
