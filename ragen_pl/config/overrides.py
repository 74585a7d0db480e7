"""Overrides of the command line for Python values."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from ragen_pl.config.errors import ConfigError


def overrides_of(settings: Mapping[str, Any], *, groups: set[str]) -> list[str]:
    """Return the command line's overrides for Python values.

    A string chooses an option of a group. A mapping sets keys below its own. `env` may be an environment's class.

    Args:
        settings: Values by key. A key may have dots, and `+` or `~` before it.
        groups: Names of the groups.

    Raises:
        ConfigError: A value is none that a configuration can hold.

    >>> overrides_of({"env": "bandit", "trainer": {"max_epochs": 3}, "seed": None}, groups={"env"})
    ["env='bandit'", 'trainer.max_epochs=3', 'seed=null']
    """
    choices, values = [], []
    for key, value in _flattened(settings):
        group = key.replace(".", "/")
        if key == "env" and inspect.isclass(value):
            choices.append("env=custom")
            values.append(f"env.target={_literal(key, f'{value.__module__}.{value.__qualname__}')}")
        elif group in groups:
            choices.append(f"{group}={_literal(key, value)}")
        else:
            values.append(f"{key}={_literal(key, value)}")
    return choices + values


def key_of(line: str) -> str:
    """Return the full name of the key that an override sets.

    >>> key_of("+env.kwargs/size=3")
    'env.kwargs.size'
    """
    return line.partition("=")[0].lstrip("+~").partition("@")[0].replace("/", ".")


def _flattened(settings: Mapping[str, Any], *, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, above=f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _literal(key: str, value: object) -> str:
    """Return a value in Hydra's grammar of overrides."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | PathLike():
            return QuotedString(fspath(value), Quote.single).with_quotes()
        case Mapping():
            return (
                f"{{{', '.join(f'{name}: {_literal(key, one)}' for name, one in value.items())}}}"
            )
        case Sequence():
            return f"[{', '.join(_literal(key, one) for one in value)}]"
    raise ConfigError(
        f"{key}: got a value of type {type(value).__name__}; give a number, string, None, list or mapping"
    )
