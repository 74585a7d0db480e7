"""Arguments of constructors, held against their annotations at each call."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ragen_pl.base.constraints import shown, validated

Function = TypeVar("Function", bound=Callable[..., Any])


def needs_trust(*arguments: str) -> Callable[[Function], Function]:
    """Return a decorator that declares what files of somebody else may not set for a function.

    A class that settings may name has it as an attribute, `needs_trust = ("command",)`. Both are read from source
    (`ragen_pl.config.signatures.declared_trust`), and a class or function without one is refused in such files.

    Args:
        arguments: Names of arguments, or patterns of the dotted names in them, whose texts can make it start a process,
            import a module, open a file or send something; `*` for the whole function. None for one that can't.
    """

    def same(function: Function) -> Function:
        return function

    return same


def checked(target: Function) -> Function:
    """Return a dataclass, function or constructor whose arguments are held against their annotations.

    A text given for a `StrEnum` is replaced by the member.

    Raises:
        ValueError: At a call, with the argument, what was expected and what was given.

    >>> @checked
    ... def turn(*, degrees: int = 90) -> int:
    ...     return degrees
    >>> turn(degrees="left")
    Traceback (most recent call last):
        ...
    ValueError: turn: degrees=left: expected a whole number
    """
    if inspect.isclass(target):
        # a dataclass has the fields of its bases
        target.__init__ = _checked_call(target.__init__, target.__mro__, name=target.__name__)  # type: ignore[method-assign]
        return target
    return _checked_call(target, [target], name=target.__qualname__.removesuffix(".__init__"))


def _checked_call(function: Function, annotated: Sequence[Any], *, name: str) -> Function:
    """Return a function whose arguments are held against annotations.

    Args:
        function: The function.
        annotated: Objects that have the annotations of its arguments, the first of a name counts.
        name: Its name in messages.
    """
    signature = inspect.signature(function)

    @functools.cache
    def annotation_of(key: str) -> Any:
        for one in annotated:
            annotations = inspect.get_annotations(one)
            if key in annotations:
                return _evaluated(annotations[key], vars(sys.modules[one.__module__]))
        return Any

    @functools.wraps(function)
    def call(*arguments: Any, **settings: Any) -> Any:
        bound = signature.bind(*arguments, **settings)
        for key, value in bound.arguments.items():
            try:
                found = validated(annotation_of(key), value, components=False)
            except ValueError as error:
                raise ValueError(f"{name}: {key}={shown(value)}: {error}") from None
            if isinstance(value, str):
                bound.arguments[key] = found
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def _evaluated(annotation: Any, scope: dict[str, Any]) -> Any:
    try:
        return eval(annotation, scope) if isinstance(annotation, str) else annotation
    except NameError:  # imported for type checking only
        return Any
