"""Overrides of the command line for Python values."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from os import PathLike, fspath
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from ragen_pl.config.errors import ConfigError
from ragen_pl.config.nodes import leaves

# of a class: an option of a group has no dots, but may be given as a file
_CLASS_PATH = re.compile(r"(?!.*\.(?:py|ya?ml)$)[^\W\d]\w*([.:][^\W\d]\w*)+")
# configurations with an environment by default
_WITH_DEFAULTS = ("fit", "serve_environment")


def overrides_of(settings: Mapping[str, Any], *, groups: set[str]) -> list[str]:
    """Return the command line's overrides for Python values.

    A string chooses an option of a group. A mapping sets keys below its own. `env` may be an environment's class, or a
    function of a module that makes one.

    Args:
        settings: Values by key. A key may have dots, and `+` or `~` before it.
        groups: Names of the groups.

    Raises:
        ConfigError: A value is none that a configuration can hold.

    >>> overrides_of({"env": "bandit", "trainer": {"max_epochs": 3}, "seed": None}, groups={"env"})
    ["env='bandit'", 'trainer.max_epochs=3', 'seed=null']
    >>> overrides_of({"validation.baselines": None}, groups={"validation/baselines"})
    ['validation.baselines=null']
    """
    choices, values = [], []
    for key, value in leaves(settings, lists=False):
        group = key.replace(".", "/")
        if key in ("env", "env.target") and _is_importable(value):
            path = _literal(key, f"{value.__module__}.{value.__qualname__}")
            choices += ["env=custom"] if key == "env" else []
            values.append(f"env.target={path}")
        elif group in groups and value is not None:
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


def from_home(word: str) -> str:
    """Return an override with the home folder in place of a `~/` that its value begins with.

    A shell expands `~` at the start of a word only, which is that of the key.

    >>> from_home("to=a~/b")
    'to=a~/b'
    """
    key, _, value = word.partition("=")
    return f"{key}={os.path.expanduser(value)}" if value.startswith("~/") else word


def with_environment(overrides: Sequence[str], *, command: str) -> list[str]:
    """Return a command line's overrides with `env=custom` where they name an environment's class only.

    The environment has the name of its class, so that runs of different classes have different names.

    Args:
        overrides: As on the command line.
        command: Name of its configuration. A command that reads a run's settings has an environment already.

    Raises:
        ConfigError: A sweep is over classes and files.

    >>> with_environment(["env=mine.Shop", "seed=1"], command="fit")
    ['env=custom', 'env.target=mine.Shop', 'seed=1', 'env.name=mine.Shop']
    >>> with_environment(["env.target=mine:Shop", "env.name=shop"], command="fit")
    ['env=custom', 'env.target=mine.Shop', 'env.name=shop']
    >>> with_environment(["env=mine.Shop,mine.Desk"], command="fit")
    ['env=custom', 'env.target=mine.Shop,mine.Desk', 'env.name=${env.target}']
    """
    completed: list[str] = []
    path = None
    for line in overrides:
        key, _, value = line.partition("=")
        # several values of a sweep
        are_classes = {
            _CLASS_PATH.fullmatch(one.strip("'\" ")) is not None for one in value.split(",")
        }
        if key.lstrip("+") == "env" and are_classes == {True, False}:
            raise ConfigError(
                f"{line}: a sweep is over classes or over files; write a file conf/env/NAME.yaml with env.target for "
                "each class, and add --config-dir conf"
            )
        if key.lstrip("+") in ("env", "env.target") and are_classes == {True}:
            completed += ["env=custom"] if key.endswith("env") else []
            # as entry points write it
            path = value.replace(":", ".")
            completed.append(f"env.target={path}")
        else:
            completed.append(line)
    parts = [line.lstrip("+").partition("=") for line in completed]
    given = {key: value.strip("'\"") for key, _, value in parts}
    if (
        command in _WITH_DEFAULTS
        and "env.target" in given
        and not given.keys() & {"env", "experiment"}
    ):
        completed, given["env"] = ["env=custom", *completed], "custom"
    if path is not None and given.get("env") == "custom" and "env.name" not in given:
        completed.append(f"env.name={'${env.target}' if ',' in path else path}")
    return completed


def _is_importable(value: object) -> bool:
    """Return whether a value is a class, or a function that a module defines by its name."""
    return inspect.isclass(value) or (inspect.isfunction(value) and "<" not in value.__qualname__)


def _remedy(key: str, value: object) -> str:
    """Return how to give what a configuration cannot hold."""
    cls = value if inspect.isclass(value) else type(value)
    if key != "env":
        path = f"{cls.__module__}.{cls.__qualname__}"
        return f"give an object as {{'_target_': '{path}', …}}, with its arguments"
    import gymnasium  # loads numpy

    arguments = "and its arguments as **{'env.kwargs.NAME': …}"
    if isinstance(value, gymnasium.Wrapper) and value.spec is not None:
        return f"give its id, env='gym' and **{{'env.kwargs.id': '{value.spec.id}'}}"
    if callable(value):
        return f"give a class, or a function that a module defines by its name, {arguments}"
    return f"give the class, env={cls.__name__}, {arguments}"


def _literal(key: str, value: object) -> str:
    """Return a value in Hydra's grammar of overrides."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        # numpy's numbers, which are shown with their type, too
        case Integral():
            return repr(int(value))
        case Real():
            return repr(float(value))
        case str() | PathLike():
            return QuotedString(fspath(value), Quote.single).with_quotes()
        case Mapping():
            return (
                f"{{{', '.join(f'{name}: {_literal(key, one)}' for name, one in value.items())}}}"
            )
        case Sequence():
            return f"[{', '.join(_literal(key, one) for one in value)}]"
    raise ConfigError(
        f"{key}: got a value of type {type(value).__name__}; give a number, string, None, list or mapping; "
        f"{_remedy(key, value)}"
    )
