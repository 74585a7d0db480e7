"""Arguments of constructors, held against their annotations at each call."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ragen_pl.constraints import shown, validated

Function = TypeVar("Function", bound=Callable[..., Any])


def checked(target: Function) -> Function:
    """Return a dataclass, function or constructor whose arguments are held against their annotations.

    A text given for a `StrEnum` is replaced by the member.

    Raises:
        ValueError: at a call, with the argument, what was expected and what was given.

    >>> @checked
    ... def turn(*, side: Literal["left", "right"] = "left") -> str:
    ...     return side
    >>> turn(side="rigth")
    Traceback (most recent call last):
        ...
    ValueError: turn: side=rigth: expected one of left, right; did you mean right?
    """
    if inspect.isclass(target):
        fields = functools.cache(lambda: _fields(target))
        target.__init__ = _checked_call(target.__init__, fields, name=target.__name__)  # type: ignore[method-assign]
        return target
    parameters = functools.cache(lambda: _parameters(target))
    return _checked_call(target, parameters, name=target.__qualname__.removesuffix(".__init__"))


def _fields(cls: type) -> dict[str, Any]:
    """Return the annotations of a dataclass and its bases, each evaluated in its own module."""
    return {
        name: _evaluated(annotation, vars(sys.modules[base.__module__]))
        for base in reversed(cls.__mro__)
        for name, annotation in vars(base).get("__annotations__", {}).items()
    }


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    scope = vars(sys.modules[function.__module__])
    return {
        parameter.name: _evaluated(parameter.annotation, scope)
        for parameter in inspect.signature(function).parameters.values()
    }


def _checked_call(
    function: Function, annotations: Callable[[], dict[str, Any]], *, name: str
) -> Function:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **settings: Any) -> Any:
        bound = signature.bind(*arguments, **settings)
        for key, value in bound.arguments.items():
            try:
                found = validated(annotations().get(key, Any), value, components=False)
            except ValueError as error:
                raise ValueError(f"{name}: {key}={shown(value)}: {error}") from None
            if isinstance(value, str):
                bound.arguments[key] = found
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def _evaluated(annotation: Any, scope: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return Any if annotation is inspect.Parameter.empty else annotation
    try:
        return eval(annotation, scope)
    except NameError:  # imported for type checking only
        return Any
