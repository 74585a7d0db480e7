"""What a rule about a configuration key says and how a value is held against it; the rules are in `schema`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase


class Kind(StrEnum):
    """What a value must be."""

    BOOL = "true or false"
    INT = "a whole number"
    FLOAT = "a number"
    TEXT = "text"
    PATH = "a path that exists"
    TARGET = "a class path such as package.module.Name"
    GROUP = "a group of settings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One constraint on the values of a key.

    `also` are values allowed besides those of `kind`; `choices` close the set of texts; `contains` is
    what an open text must hold; `note` is told with the expectation.
    """

    kind: Kind
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    also: tuple[bool | int | float | str | None, ...] = ()
    choices: tuple[str, ...] = ()
    contains: str = ""
    note: str = ""

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a value, as `expected …`, or None."""
        if any(
            value is other or (type(value) is type(other) and value == other) for other in self.also
        ):
            return None
        if self._fits(value):
            return None
        return f"expected {self.expectation()}{self._guess(value)}"

    def expectation(self) -> str:
        """Return in words what the rule asks for."""
        words = f"one of {', '.join(self.choices)}" if self.choices else str(self.kind)
        limits = {
            "at least": self.minimum,
            "above": self.above,
            "at most": self.maximum,
            "below": self.below,
        }
        if bounds := [f"{word} {limit}" for word, limit in limits.items() if limit is not None]:
            words = f"{words}, {' and '.join(bounds)}"
        if self.contains:
            words = f"{words} with {self.contains} in it"
        for other in self.also:
            words += f" or {_shown(other)}"
        return words + (f" ({self.note})" if self.note else "")

    def _fits(self, value: object) -> bool:
        match self.kind:
            case Kind.BOOL:
                return isinstance(value, bool)
            case Kind.INT:
                return (
                    isinstance(value, int) and not isinstance(value, bool) and self._inside(value)
                )
            case Kind.FLOAT:
                number = isinstance(value, int | float) and not isinstance(value, bool)
                return number and math.isfinite(value) and self._inside(value)  # type: ignore[arg-type]
            case Kind.TEXT:
                return isinstance(value, str) and self._text_fits(value)
            case Kind.PATH:
                return isinstance(value, str) and os.path.exists(os.path.expanduser(value))
            case Kind.TARGET:
                return isinstance(value, str) and all(
                    part.isidentifier() for part in value.split(".")
                )
            case Kind.GROUP:
                return isinstance(value, Mapping)

    def _text_fits(self, value: str) -> bool:
        if self.choices:
            return value in self.choices
        return bool(value.strip()) and self.contains in value

    def _inside(self, value: float) -> bool:
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    def _guess(self, value: object) -> str:
        close = get_close_matches(str(value), self.choices, n=1)
        return f"; did you mean {close[0]}?" if close else ""


def covers(pattern: str, key: str) -> bool:
    """Return whether a pattern covers a key: `*` stands for one part, a last `**` for all that follow.

    >>> covers("optimizer.betas.*", "optimizer.betas.0"), covers("optimizer.*", "optimizer.betas.0")
    (True, False)
    >>> covers("callbacks.**", "callbacks.progress.every"), covers("callbacks.**", "callbacks")
    (True, False)
    """
    wanted, parts = pattern.split("."), key.split(".")
    if wanted[-1] == "**":
        wanted = wanted[:-1]
        if len(parts) <= len(wanted):
            return False
        parts = parts[: len(wanted)]
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


def _shown(value: object) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words.get(value, str(value)) if value is None or isinstance(value, bool) else str(value)
