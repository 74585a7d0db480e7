"""Import of an optional library."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def optional_import(module: str, *, extra: str) -> Any:
    """Return a module of a library that an extra installs.

    Raises:
        ImportError: It is not installed; with the command that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error.name} is not installed; run pip install 'ragen_pl[{extra}]'"
        ) from error
