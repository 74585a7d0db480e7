"""Structure of a pickle without its objects: which tensor has which values. Nothing is imported and no code runs."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

# characters of a name in a message
_LONGEST_NAME = 200


class _Object:
    """An object of any class: its arguments and its state."""

    def __new__(cls, *arguments: Any, **named: Any) -> _Object:
        made = super().__new__(cls)
        made.__dict__.update(arguments=arguments, state=named)
        return made

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Take any arguments, as the class of the pickle may."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


class _Outline(pickle._Unpickler):
    """Unpickler that has an `_Object` for every class and function.

    It is the one in Python: that in C makes room for as many objects as a file says.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return a class without any code."""
        return (
            OrderedDict if name == "OrderedDict" else type(name, (_Object,), {"__module__": module})
        )

    def persistent_load(self, pid: Any) -> Any:
        """Return the values of a tensor: the name of their record."""
        return _Object(str(pid[2]))


def _loaded(content: bytes) -> Any:
    """Return the outline of a pickle, None if it is none."""
    try:
        return _Outline(io.BytesIO(content)).load()
    # a damaged pickle may raise anything
    except Exception:
        return None


def entry_of(content: bytes, name: str) -> Any:
    """Return the outline of an entry of a pickled dictionary, None where it has none or is something else."""
    loaded = _loaded(content)
    return loaded.get(name) if isinstance(loaded, dict) else None


def place_of(record: str, content: bytes) -> str | None:
    """Return where the tensor of a record stands in a file of `torch.save`, None if it stands nowhere.

    Args:
        record: Name of the record in the archive, such as `archive/data/3`.
        content: The archive's pickle.
    """
    folder, _, name = record.rpartition("/")
    if not folder.endswith("/data"):
        return None
    try:
        return next(_places(_loaded(content), _Object(name), place="", seen=set()), None)
    except RecursionError:
        return None


def _places(value: Any, values: _Object, *, place: str, seen: set[int]) -> Iterator[str]:
    """Yield where the values of a record are used, as keys and numbers with dots between them.

    What is held several times is looked at once.
    """
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        parts = iter(value.items())
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    elif isinstance(value, _Object):
        if type(value) is _Object and vars(value)["arguments"] == vars(values)["arguments"]:
            yield place
        # a tensor has the place of its values
        for inner in (*vars(value)["arguments"], vars(value)["state"]):
            yield from _places(inner, values, place=place, seen=seen)
    for key, inner in parts:
        name = f"{place}.{key}".removeprefix(".")
        yield from _places(inner, values, place=name, seen=seen)


def items_of(content: bytes) -> list[tuple[str, str, int, int]] | None:
    """Return the tensors in the list of a sharded checkpoint: name, file, first byte and number of bytes.

    Returns:
        None if it is no such list, or names files elsewhere.
    """
    listed = _loaded(content)
    try:
        stored = vars(listed)["state"]["storage_data"]
        items = [
            (_state(index)["fqn"], _state(place)["relative_path"], _state(place)["offset"], _state(place)["length"])
            for index, place in stored.items()
        ]  # fmt: skip
    except (AttributeError, KeyError, TypeError):
        return None
    fits = all(
        isinstance(part, str) and PurePath(part).name == part and part.endswith(".distcp") and isinstance(offset, int)
        and isinstance(length, int) and min(offset, length) >= 0
        for _, part, offset, length in items
    )  # fmt: skip
    return items if fits else None


def class_in(content: bytes) -> str | None:
    """Return the name of the class or function that a pickle's object is made by, None where it has no plain name."""
    kind = type(_loaded(content))
    name = f"{kind.__module__}.{kind.__name__}"
    is_plain = len(name) < _LONGEST_NAME and all(part.isidentifier() for part in name.split("."))
    return name if issubclass(kind, _Object) and is_plain else None


def _state(value: Any) -> Mapping[str, Any]:
    state: Mapping[str, Any] = vars(value)["state"]
    return state
