"""Types and bounds of settings, as annotations of constructors; read without torch.

A range is `Annotated[int, Ge(1)]` with the metadata of `annotated_types`, a closed set of words is a
`Literal` or a `StrEnum`. Pydantic checks the values. `ragen_pl.base.checked` enforces the annotations of a constructor
at run time; `ragen_pl.config` reads the same annotations from the source for the command line.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import chain
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import BaseMetadata, Ge, GroupedMetadata, Gt, Interval, Le, Lt, Predicate

from ragen_pl.base.instances import instances

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@dataclass(frozen=True)
class Text(Predicate):
    """Metadata of a text that a function accepts.

    Args:
        expected: The constraint in words.
        names: Returns names for suggestions.
        outside: Whether other texts are possible outside a configuration.
    """

    expected: str = "text"
    names: Callable[[], tuple[str, ...]] = tuple
    outside: bool = False


def containing(part: str) -> Text:
    """Return the metadata of a text that holds another text."""
    return Text(lambda text: part in text, f"text with {part} in it")


def matching(pattern: str, example: str) -> Text:
    """Return the metadata of a text that matches a regular expression as a whole.

    Args:
        pattern: The expression.
        example: Such a text, for messages.
    """
    return Text(lambda text: re.fullmatch(pattern, text) is not None, f"text such as {example}")


def declared(constant: str, prefix: str = "") -> Text:
    """Return the metadata of a text in a configuration that is one of the names in the constants of this name.

    The modules of `metrics` and `callbacks` declare them; some are patterns, such as `action/*`. Other names are
    possible outside a configuration.
    """

    def names() -> tuple[str, ...]:
        return tuple(f"{prefix}{name}" for name in declared_names(constant))

    return Text(
        lambda text: any(fnmatchcase(text, name) for name in names()),
        "a name that the run measures (docs/diagnostics.md)",
        names,
        outside=True,
    )


@functools.cache
def declared_names(constant: str) -> tuple[str, ...]:
    """Return the names in all constants of this name, read from source: an import would load torch."""
    package = Path(__file__).parents[1]
    files = [file for part in ("metrics", "callbacks") for file in (package / part).glob("*.py")]
    return tuple(name for file in sorted(files) for name in _constant_in(file, constant))


def _constant_in(file: Path, constant: str) -> Iterator[str]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == constant and node.value:
            yield from ast.literal_eval(node.value)


@dataclass(frozen=True)
class Note:
    """Metadata that is added to the expectation in messages."""

    text: str


@dataclass(frozen=True)
class Open:
    """Metadata of a group of settings that takes other keys too."""


@dataclass(frozen=True)
class Arguments:
    """Metadata of a group of settings whose keys are the keyword-only arguments of the constructor `target`.

    The class may have rules on the group and on other nodes, see `ragen_pl.config.relations`.

    Args:
        target: Class path.
        without: Arguments that are no keys.
    """

    target: str
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArgumentsOf:
    """Metadata of a group of settings whose keys are arguments of the class that another setting names.

    Args:
        sibling: Setting in the same parent that names the class.
        default: Full name of the setting that names the class if there is no such sibling.
    """

    sibling: str
    default: str = ""


@dataclass(frozen=True)
class TextOnly:
    """Metadata of the return annotation of a function that builds a model without images."""


Count = Annotated[int, Ge(1)]
CountOrZero = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
PositiveFraction = Annotated[float, Interval(gt=0, le=1)]
FractionBelowOne = Annotated[float, Interval(ge=0, lt=1)]
Seed = Annotated[int, Interval(ge=0, le=2**32 - 1)]
Port = Annotated[int, Interval(ge=0, le=65535), Note("a port")]
TurnTemplate = Annotated[str, containing("{observation}")]
ExistingPath = Annotated[
    str, Text(lambda path: os.path.exists(os.path.expanduser(path)), "a path that exists")
]
Duration = Annotated[
    str, matching(r"\d+:\d+:\d+:\d+", "00:12:00:00 (days, hours, minutes, seconds)")
]

_KINDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", None: "null", NoneType: "null",
}  # fmt: skip
_BOUNDS: dict[type, str] = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}


def options(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, or the annotation itself."""
    if get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            yield from options(option)
    else:
        yield annotation


def problem(annotation: Any, value: object) -> str | None:
    """Return the expectation of an annotation that a value of a configuration misses, None if it fits.

    >>> problem(Literal["all"] | Count, 0)
    'expected all or a whole number, at least 1'
    >>> problem(Literal["turn", "end"], "ed")
    'expected one of turn, end; did you mean end?'
    """
    try:
        validated(annotation, value)
    except ValueError as error:
        return str(error)
    return None


def validated(annotation: Any, value: Any, *, components: bool = True) -> Any:
    """Return a value as its annotation has it: a member of a `StrEnum` for its text.

    Args:
        annotation: The annotation of a parameter; `Any` and what is unknown accept everything.
        value: Plain values as YAML has them, or arguments of a constructor.
        components: Whether a class annotation refuses plain values, as in a configuration.

    Raises:
        ValueError: What was expected, and the nearest word.
    """
    # numbers of numpy
    if isinstance(value, Real) and value is not True and value is not False:
        value = int(value) if isinstance(value, Integral) else float(value)
    with suppress(ValueError):  # pydantic's
        checkable = _checkable(annotation, components=components)
        found = _adapter(checkable).validate_python(value)
        # in a `Literal`, pydantic takes true and 1.0 for 1
        if not isinstance(found, int) or type(found) is type(value):
            return found
    parts = list(options(annotation))
    words = [word for part in parts for word in _suggestions(part) if word != value]
    raise ValueError(f"expected {expectation(annotation)}{did_you_mean(value, words)}")


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return the nearest of some names as the end of a message, nothing if none is near.

    >>> did_you_mean("hole_share", ["size", "hole_fraction"])
    '; did you mean hole_fraction?'
    """
    known = list(names)
    first, has_more, _ = str(name).partition("_")
    alike = [other for other in known if has_more and other.startswith(f"{first}_")]
    close = get_close_matches(str(name), known, n=1) or (alike if len(alike) == 1 else [])
    return f"; did you mean {close[0]}?" if close else ""


@functools.cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    # `--help` and `--cfg` check no values
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))


@functools.cache
def _checkable(annotation: Any, *, components: bool) -> Any:
    """Return an annotation that pydantic checks; a class accepts a group of settings, or everything once built."""
    parts = (_read(option, components=components)[0] for option in options(annotation))
    return Union[tuple(parts)]  # noqa: UP007 (of a tuple)


def expectation(annotation: Any) -> str:
    """Return the values that an annotation accepts, in words.

    >>> expectation(Count | None)
    'a whole number, at least 1 or null'
    """
    return " or ".join(_read(option)[1] for option in options(annotation))


def _read(annotation: Any, *, components: bool = True) -> tuple[Any, str]:
    """Return an annotation, no union, as pydantic checks it, and the values that it accepts in words."""
    base, metadata = unwrapped(annotation)
    words = words_of(base)
    kind, text = base, _KINDS.get(base, "a group of settings")
    if words:
        kind = Literal[words] if inspect.isclass(base) else base  # members of a StrEnum
        text = f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    elif (get_origin(base) or base) in (list, tuple, Sequence):
        item = (get_args(base) or (Any,))[0]
        kind = Sequence[_checkable(item, components=components)]  # type: ignore[misc]
        text = "a list" + ("" if item is Any else f", each item {expectation(item)}")
    elif base not in _KINDS:
        is_group = (get_origin(base) or base) in (dict, Mapping)
        kind = Mapping if is_group or (components and base not in (Any, object)) else Any
    texts = instances(metadata, Text)
    checks = [
        item
        for item in metadata
        if isinstance(item, BaseMetadata | GroupedMetadata)
        and (components or not (item in texts and item.outside))
    ]
    text = texts[-1].expected if texts else text + _bounds(checks)
    text += "".join(f" ({item.text})" for item in instances(metadata, Note))
    return Annotated[(kind, *checks)] if checks else kind, text


def _bounds(checks: Iterable[Any]) -> str:
    parts = (item if isinstance(item, GroupedMetadata) else [item] for item in checks)
    bounds = [
        f"{_BOUNDS[type(part)]} {astuple(part)[0]}"
        for part in chain(*parts)
        if type(part) in _BOUNDS
    ]
    return f", {' and '.join(bounds)}" if bounds else ""


def _suggestions(annotation: Any) -> tuple[str, ...]:
    names = [item.names() for item in instances(unwrapped(annotation)[1], Text)]
    return names[0] if any(names) else words_of(annotation)


def unwrapped(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return an annotation's type and its metadata."""
    if get_origin(annotation) is Annotated:
        base, *metadata = get_args(annotation)
        return base, tuple(metadata)
    return annotation, ()


def words_of(annotation: Any) -> tuple[str, ...]:
    """Return the texts of a `Literal` or a `StrEnum`, none for any other annotation."""
    base, _ = unwrapped(annotation)
    if get_origin(base) is Literal:
        return tuple(shown(word) for word in get_args(base))
    return tuple(base) if inspect.isclass(base) and issubclass(base, StrEnum) else ()


def shown(value: object) -> str:
    """Return a value as it is written on the command line.

    >>> shown(None), shown(True), shown(0.5)
    ('null', 'true', '0.5')
    """
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def path_override(key: str, path: str | Path) -> str:
    """Return an override of a key by a path, which is in quotes where Hydra's grammar needs them.

    >>> path_override("ckpt_path", "runs/a b/last.ckpt"), path_override("run", "runs (1)")
    ('ckpt_path=runs/a b/last.ckpt', "run='runs (1)'")
    """
    text = str(path)
    if re.fullmatch(r"[\w./:+@-]+( +[\w./:+@-]+)*", text, re.ASCII):
        return f"{key}={text}"
    return f"{key}='" + text.replace("'", r"\'") + "'"
