"""Pickles of plain values, arrays and objects of known classes. Reading one runs no code of the file."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import IO, Any

import numpy as np

from ragen_pl.base.former_names import current

# bool, integers, floats, complex, texts, bytes, times
_KINDS = "biufcUSMm"


class KnownUnpickler(pickle._Unpickler):
    """Unpickler of plain values and of objects of known classes. It imports nothing.

    It is the one in Python: that in C makes room for as many objects as a file says.

    Args:
        file: The pickle.
        known: Classes and functions that it may use, by module and name.
    """

    def __init__(self, file: IO[bytes], known: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        """Return a known class or function.

        Raises:
            pickle.UnpicklingError: It is another one.
        """
        found = self._known.get((current(module), name))
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} is not known here, and may run any code")
        return found


def by_name(objects: Iterable[Any]) -> dict[tuple[str, str], Any]:
    """Return classes and functions by module and name, as a pickle names them."""
    return {(each.__module__, each.__qualname__): each for each in objects}


class _Pickler(pickle.Pickler):
    """Writes arrays by type, shape and bytes. A type in one of numpy's own pickles can break its memory."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray or isinstance(value, np.generic):
            return _array, (
                value.dtype.str,
                value.shape,
                value.tobytes(),
                type(value) is np.ndarray,
            )
        return NotImplemented


def _array(dtype: str, shape: tuple[int, ...], data: bytes, is_array: bool) -> Any:
    kind = np.dtype(dtype)
    if kind.kind not in _KINDS:
        raise pickle.UnpicklingError(f"an array of type {kind} is no plain data")
    array = np.frombuffer(data, kind).reshape(shape).copy()
    return array if is_array else array[()]


def packed(value: Any) -> bytes:
    """Return a value as a pickle that `unpacked` reads.

    Raises:
        pickle.PicklingError: It can't be pickled, as with TypeError and AttributeError.
    """
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def unpacked(data: bytes, known: Iterable[type]) -> Any:
    """Return the value of `packed`.

    Args:
        data: The pickle.
        known: Classes that it may hold objects of.

    Raises:
        pickle.UnpicklingError: It holds others.
    """
    return KnownUnpickler(io.BytesIO(data), by_name([*known, _array])).load()
