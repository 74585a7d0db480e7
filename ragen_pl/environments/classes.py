"""Class and constructor of an environment by its gymnasium id or class path, and the words that it declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from reprlib import repr as shortened
from typing import Any, Protocol, runtime_checkable

import gymnasium
from gymnasium.envs.registration import (
    find_highest_version,
    get_env_id,
    load_env_creator,
    parse_env_id,
)


@runtime_checkable
class DeclaresWords(Protocol):
    """Class of environments that declares the frequent words of its observations and answers."""

    frequent_words: Sequence[str]


def is_gymnasium_id(target: str) -> bool:
    """Return whether a target is a gymnasium id, and not a class path."""
    return "/" in target or target in gymnasium.registry


def environment_class(target: str) -> Any:
    """Return the class of an environment, or whatever else makes it.

    Args:
        target: gymnasium id or class path.

    Raises:
        Exception: There is no such environment, or its module raises.
    """
    if not is_gymnasium_id(target):
        module, _, name = target.rpartition(".")
        return getattr(import_module(module), name)
    module, _, env_id = target.rpartition(":")
    if module:
        import_module(module)
    if env_id not in gymnasium.registry:
        # gymnasium.make takes the newest version where none is given
        namespace, name, version = parse_env_id(env_id)
        newest = find_highest_version(namespace, name) if version is None else version
        env_id = get_env_id(namespace, name, newest)
    entry_point = gymnasium.spec(env_id).entry_point
    return load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point


def environment_maker(
    target: str, *, process: bool = False, memory_mb: int | None = None
) -> Callable[..., gymnasium.Env[Any, Any]]:
    """Return the constructor of an environment.

    Args:
        target: gymnasium id or class path.
        process: Whether it makes the environment in a process of its own.
        memory_mb: Memory that such a process may allocate in MiB; None for no limit.

    Raises:
        ValueError: There is no such environment.
    """
    made: Callable[..., gymnasium.Env[Any, Any]]
    try:
        if is_gymnasium_id(target):
            made = partial(gymnasium.make, target, disable_env_checker=True)
        else:
            made = environment_class(target)
    except Exception as error:
        remedy = (
            "give a gymnasium id or a class path such as 'ragen_pl.envs.frozen_lake.FrozenLake'"
        )
        if isinstance(error, ModuleNotFoundError) and f"{target}.".startswith(f"{error.name}."):
            remedy += "; Python looks for modules in the current folder and on PYTHONPATH"
        raise ValueError(
            f"env.target={target}: names no environment ({error}); {remedy}"
        ) from error
    if process and target.rpartition(".")[0] == "__main__":
        raise ValueError(
            f"env.target={target}: another process cannot import it from a notebook or a script; put it into a module, "
            "or set env.process=false"
        )
    if process:
        from ragen_pl.environments.process import ProcessEnvironment

        return lambda **kwargs: ProcessEnvironment(target, kwargs, memory_mb=memory_mb)
    return made


def frequent_words(target: str) -> tuple[str, ...]:
    """Return the `frequent_words` of an environment's class; empty where it declares none.

    Args:
        target: gymnasium id or class path.

    Raises:
        TypeError: They are no tuple or list of texts.
        Exception: There is no such environment, or its module raises.
    """
    found = environment_class(target)
    if not isinstance(found, DeclaresWords):
        return ()
    words: Any = found.frequent_words
    if isinstance(words, list | tuple) and all(isinstance(word, str) and word for word in words):
        return tuple(words)
    raise TypeError(
        f"env.target={target}: found frequent_words={shortened(words)}, expected a tuple of texts, none of them empty; "
        "set one on the class"
    )
