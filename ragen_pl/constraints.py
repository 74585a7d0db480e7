"""Types and bounds of settings, as annotations of constructors; read without torch.

A range is `Annotated[int, Ge(1)]` with the metadata of `annotated_types`, a closed set of words is a
`Literal` or a `StrEnum`. `ragen_pl.checked` enforces the annotations of a constructor at run time;
`ragen_pl.config` reads the same annotations from the source for the command line.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    Union,
    get_args,
    get_origin,
    runtime_checkable,
)

from annotated_types import Ge, Gt, Interval, Le, Lt


@runtime_checkable
class TextConstraint(Protocol):
    """Metadata that decides which texts are accepted."""

    @property
    def expected(self) -> str:
        """Return the constraint in words."""
        ...

    def accepts(self, value: str) -> bool:
        """Return whether the text is accepted."""
        ...


@dataclass(frozen=True)
class ExistingPath:
    """Metadata of a text that names an existing file or folder."""

    expected = "a path that exists"

    def accepts(self, value: str) -> bool:
        """Return whether something exists at the path."""
        return os.path.exists(os.path.expanduser(value))


@dataclass(frozen=True)
class Contains:
    """Metadata of a text that holds another text."""

    part: str

    @property
    def expected(self) -> str:
        """Return the constraint in words."""
        return f"text with {self.part} in it"

    def accepts(self, value: str) -> bool:
        """Return whether the text holds the part."""
        return self.part in value


@dataclass(frozen=True)
class Matches:
    """Metadata of a text that a regular expression matches as a whole.

    Args:
        pattern: the expression.
        example: such a text in words.
    """

    pattern: str
    example: str

    @property
    def expected(self) -> str:
        """Return the constraint in words."""
        return f"text such as {self.example}"

    def accepts(self, value: str) -> bool:
        """Return whether the expression matches."""
        return re.fullmatch(self.pattern, value) is not None


@dataclass(frozen=True)
class Needs:
    """Metadata of a word that one of these packages has to be installed for.

    Args:
        word: the word.
        packages: names to import, any of which serves.
        install: name of the first one for pip.
    """

    word: str
    packages: tuple[str, ...]
    install: str

    @property
    def expected(self) -> str:
        """Return the constraint in words."""
        return f"{self.word} with {self.packages[0]} installed (pip install {self.install})"

    def accepts(self, value: str) -> bool:
        """Return whether a package is installed."""
        return any(find_spec(package) is not None for package in self.packages)


@dataclass(frozen=True)
class Declared:
    """Metadata of a text in a configuration that is one of the names in the constants of this name.

    The modules of `metrics` and `callbacks` declare them. Other names are possible outside a configuration.
    """

    constant: str
    prefix: str = ""
    expected = "a name that the run measures (docs/diagnostics.md)"

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names; some are patterns, such as `action/*`."""
        return tuple(f"{self.prefix}{name}" for name in declared_names(self.constant))

    def accepts(self, value: str) -> bool:
        """Return whether the text is one of the names."""
        return any(fnmatchcase(value, name) for name in self.names)


@functools.cache
def declared_names(constant: str) -> tuple[str, ...]:
    """Return the names in all constants of this name, read from source: an import would load torch."""
    package = Path(__file__).parent
    files = [file for part in ("metrics", "callbacks") for file in (package / part).glob("*.py")]
    return tuple(name for file in sorted(files) for name in _constant_in(file, constant))


def _constant_in(file: Path, constant: str) -> Iterator[str]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == constant and node.value:
            yield from ast.literal_eval(node.value)


@dataclass(frozen=True)
class DivisorOf:
    """Metadata of a number that divides the setting of this name in the same node."""

    name: str

    def problem(self, value: object, siblings: Mapping[str, object]) -> str | None:
        """Return the expectation that the value misses, or None."""
        whole = siblings.get(self.name)
        if isinstance(whole, int) and isinstance(value, int) and value > 0 and whole % value:
            return f"expected a divisor of {self.name}={whole}"
        return None


@dataclass(frozen=True)
class Note:
    """Metadata that is added to the expectation in messages."""

    text: str


@dataclass(frozen=True)
class Open:
    """Metadata of a group of settings that takes other keys too."""


@dataclass(frozen=True)
class Built:
    """Metadata of a group of settings from which an object is built: it names the class by `_target_`."""


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
TurnTemplate = Annotated[str, Contains("{observation}")]

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
# field of the limit, words for it, and the comparison of a value with it
_BOUNDS: dict[type, tuple[str, str, Callable[[Any, Any], bool]]] = {
    Ge: ("ge", "at least", operator.ge),
    Gt: ("gt", "above", operator.gt),
    Le: ("le", "at most", operator.le),
    Lt: ("lt", "below", operator.lt),
}


def options(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, or the annotation itself."""
    if get_origin(annotation) in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from options(option)
    else:
        yield annotation


def problem(annotation: Any, value: object, *, components: bool = True) -> str | None:
    """Return the expectation of an annotation that a value misses, None if it fits.

    Args:
        annotation: the annotation of a parameter; `Any` and what is unknown accept everything.
        value: plain values as YAML has them, or arguments of a constructor.
        components: whether a class annotation refuses plain values, as in a configuration.

    >>> problem(Literal["all"] | Count, 0)
    'expected all or a whole number, at least 1'
    >>> problem(Literal["turn", "end"], "ed")
    'expected one of turn, end; did you mean end?'
    """
    parts = list(options(annotation))
    if any(accepts(part, value, components=components) for part in parts):
        return None
    words = [word for part in parts if part is not None for word in _suggestions(part)]
    words = [word for word in words if word != value]
    expected = expectation(annotation)
    close = get_close_matches(str(value), words, n=1)
    return f"expected {expected}" + (f"; did you mean {close[0]}?" if close else "")


def expectation(annotation: Any) -> str:
    """Return the values that an annotation accepts, in words.

    >>> expectation(Count | None)
    'a whole number, at least 1 or null'
    """
    return " or ".join(_expectation(part) for part in options(annotation))


def _suggestions(annotation: Any) -> tuple[str, ...]:
    names = [item.names for item in unwrapped(annotation)[1] if isinstance(item, Declared)]
    return names[0] if names else words_of(annotation)


def accepts(annotation: Any, value: object, *, components: bool = True) -> bool:
    """Return whether one annotation, no union, accepts a value."""
    base, metadata = unwrapped(annotation)
    if get_origin(base) is Literal:
        is_word = any(
            value == word and (type(value) is type(word) or isinstance(word, StrEnum))
            for word in get_args(base)
        )
        return is_word and all(_holds(constraint, value) for constraint in metadata)
    if words := words_of(base):
        return isinstance(value, str) and value in words
    match base:
        case None | types.NoneType:
            return value is None
        case _ if base is bool:
            return isinstance(value, bool)
        case _ if base is int:
            fits = isinstance(value, Integral) and not isinstance(value, bool)
        case _ if base is float:
            fits = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
        case _ if base is str:
            fits = isinstance(value, str)
        case _:
            return _accepts_container(base, value, components=components)
    return fits and all(
        _holds(constraint, value)
        for constraint in metadata
        if components or not isinstance(constraint, Declared)
    )


def _accepts_container(base: Any, value: object, *, components: bool) -> bool:
    origin = get_origin(base) or base
    if origin in (list, tuple, Sequence):
        if isinstance(value, str) or not isinstance(value, Sequence):
            return False
        item = (get_args(base) or (Any,))[0]
        return all(problem(item, member, components=components) is None for member in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    if base is Any or base is object or not components:
        return True
    return isinstance(value, Mapping)


def _holds(constraint: Any, value: Any) -> bool:
    if isinstance(constraint, TextConstraint):
        return constraint.accepts(value)
    return all(compare(value, limit) for _, compare, limit in _bounds(constraint))


def _bounds(constraint: Any) -> Iterator[tuple[str, Callable[[Any, Any], bool], Any]]:
    """Yield words, comparison and limit of each bound in a constraint on numbers."""
    for bound in constraint if isinstance(constraint, Interval) else (constraint,):
        if type(bound) in _BOUNDS:
            name, words, compare = _BOUNDS[type(bound)]
            yield words, compare, getattr(bound, name)


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


def _expectation(annotation: Any) -> str:
    base, metadata = unwrapped(annotation)
    words = words_of(base)
    if words:
        text = f"one of {', '.join(words)}" if len(words) > 1 else words[0]
    elif base in (None, types.NoneType):
        text = "null"
    elif (get_origin(base) or base) in (list, tuple, Sequence):
        item = (get_args(base) or (Any,))[0]
        text = "a list" + ("" if item is Any else f", each item {expectation(item)}")
    else:
        text = _KINDS.get(base, "a group of settings")
    bounds = [
        f"{words} {limit}" for constraint in metadata for words, _, limit in _bounds(constraint)
    ]
    if bounds:
        text += f", {' and '.join(bounds)}"
    for constraint in metadata:
        if isinstance(constraint, TextConstraint):
            text = constraint.expected
    notes = [constraint.text for constraint in metadata if isinstance(constraint, Note)]
    return text + "".join(f" ({note})" for note in notes)


def shown(value: object) -> str:
    """Return a value as it is written on the command line.

    >>> shown(None), shown(True), shown(0.5)
    ('null', 'true', '0.5')
    """
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
