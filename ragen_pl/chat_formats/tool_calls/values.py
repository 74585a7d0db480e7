"""Strict reading of values in JSON's types, written as JSON or in a notation close to it.

The reader has a stack of its own and reads each character once: no text makes it slow or ends in a
`RecursionError`. It refuses what JSON has not: NaN, infinity, duplicate names, lone surrogates. Beyond JSON it
refuses values of more than `MAX_DEPTH` levels and numbers of more than `MAX_DIGITS` characters or beyond float64.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_DEPTH = 64
MAX_DIGITS = 4000  # Python refuses integers of more than 4300

_BLANKS = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_CLOSING = {"{": "}", "[": "]"}


class Malformed(Exception):
    """Text that does not follow the syntax.

    Attributes:
        reason: What is wrong.
        position: Character at which it is.
        reached: Position up to which the text was read, from which reading may go on.
    """

    def __init__(self, reason: str, position: int, *, reached: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position
        self.reached = position if reached is None else reached


@dataclass(frozen=True, kw_only=True)
class Notation:
    """How values are written. Objects, arrays and numbers are those of JSON in each notation.

    Attributes:
        name: What it is called where text does not follow it.
        quotes: What strings may begin with.
        read_string: Reads the string that begins at a position, given which of `quotes` it begins with; returns it
            and the position after it.
        words: Values written as words.
        bare_names: Pattern of names in objects without quotes; None where names are strings.
    """

    name: str
    quotes: tuple[str, ...]
    read_string: Callable[[str, int, str], tuple[str, int]]
    words: Mapping[str, bool | None]
    bare_names: re.Pattern[str] | None = None


def after_blanks(text: str, position: int) -> int:
    """Return the position of the first character from `position` on that is no blank of JSON."""
    match = _BLANKS.match(text, position)
    assert match is not None
    return match.end()


def refuse_surrogates(text: str, start: int, end: int) -> None:
    """Raise `Malformed` for a lone surrogate between two positions: it is no character and cannot be sent."""
    match = _SURROGATE.search(text, start, end)
    if match is not None:
        raise Malformed("lone surrogate", match.start())


def read_value(text: str, start: int, notation: Notation) -> tuple[Any, int]:
    """Read the value that begins at `start` or after blanks.

    Returns:
        The value and the position after it.

    Raises:
        Malformed: If there is none in the notation.

    >>> read_value('{"a": [1, true]} and more', 0, JSON)
    ({'a': [1, True]}, 16)
    """
    return _Reader(text, notation).read(start)


class _Reader:
    """Reads one value. `_open` holds the containers around the position, `_names` the names being given values."""

    def __init__(self, text: str, notation: Notation) -> None:
        self._text = text
        self._notation = notation
        self._open: list[dict[str, Any] | list[Any]] = []
        self._names: list[str] = []

    def read(self, start: int) -> tuple[Any, int]:
        position = after_blanks(self._text, start)
        while True:
            opening = self._text[position : position + 1]
            value: Any
            if opening in _CLOSING:
                if len(self._open) == MAX_DEPTH:
                    raise Malformed(f"more than {MAX_DEPTH} levels", position)
                inside = after_blanks(self._text, position + 1)
                value = {} if opening == "{" else []
                if self._text[inside : inside + 1] != _CLOSING[opening]:
                    self._open.append(value)
                    position = self._next_item(inside)
                    continue
                position = inside + 1
            else:
                value, position = self._scalar(position)
            following = self._place(value, position)
            if not self._open:
                return following
            position = self._next_item(following[1])

    def _place(self, value: Any, position: int) -> tuple[Any, int]:
        """Put a complete value into its container, and containers that end after it into theirs.

        Returns:
            The last value completed, and the position after it, or after the comma that follows it.
        """
        while self._open:
            container = self._open[-1]
            if isinstance(container, dict):
                container[self._names.pop()] = value
            else:
                container.append(value)
            position = after_blanks(self._text, position)
            sign = self._text[position : position + 1]
            if sign == ",":
                return value, after_blanks(self._text, position + 1)
            if sign != ("}" if isinstance(container, dict) else "]"):
                self._refuse(position)
            value, position = self._open.pop(), position + 1
        return value, position

    def _next_item(self, position: int) -> int:
        """Return the position of an item's value, past its name if the innermost container is an object."""
        container = self._open[-1]
        if not isinstance(container, dict):
            return position
        name, end = self._name(position)
        if name in container:
            raise Malformed(f"duplicate name {name[:40]!r}", position, reached=end)
        self._names.append(name)
        colon = after_blanks(self._text, end)
        if self._text[colon : colon + 1] != ":":
            self._refuse(colon)
        return after_blanks(self._text, colon + 1)

    def _name(self, position: int) -> tuple[str, int]:
        for quote in self._notation.quotes:
            if self._text.startswith(quote, position):
                return self._notation.read_string(self._text, position, quote)
        pattern = self._notation.bare_names
        match = None if pattern is None else pattern.match(self._text, position)
        if match is None:
            self._refuse(position)
        return match.group(), match.end()

    def _scalar(self, position: int) -> tuple[Any, int]:
        for quote in self._notation.quotes:
            if self._text.startswith(quote, position):
                return self._notation.read_string(self._text, position, quote)
        number = _NUMBER.match(self._text, position)
        if number is not None:
            return self._number(number.group(), position), number.end()
        word = _WORD.match(self._text, position)
        if word is None or word.group() not in self._notation.words:
            self._refuse(position)
        return self._notation.words[word.group()], word.end()

    def _number(self, digits: str, position: int) -> int | float:
        if len(digits) > MAX_DIGITS:
            raise Malformed(f"number of more than {MAX_DIGITS} characters", position)
        if digits.lstrip("-").isdecimal():
            return int(digits)
        number = float(digits)
        if not math.isfinite(number):
            raise Malformed("number beyond float64", position)
        return number

    def _refuse(self, position: int) -> NoReturn:
        if position >= len(self._text):
            raise Malformed(f"{self._notation.name} without end", position)
        raise Malformed(f"not {self._notation.name}", position)


@dataclass(frozen=True, kw_only=True)
class _Strings:
    """How quoted strings are written.

    Attributes:
        escapes: What a backslash and a letter stand for.
        codes: Pattern of the hexadecimal digits after a backslash and a letter.
        plain: Pattern of characters that stand for themselves, by quote.
        keeps_backslash: Whether a backslash stands for itself before a letter without a meaning.
    """

    escapes: Mapping[str, str]
    codes: Mapping[str, re.Pattern[str]]
    plain: Mapping[str, re.Pattern[str]]
    keeps_backslash: bool

    def read(self, text: str, start: int, quote: str) -> tuple[str, int]:
        """Read the string that begins at `start` with `quote`; return it and the position after it."""
        pieces: list[str] = []
        position = start + 1
        while True:
            match = self.plain[quote].match(text, position)
            assert match is not None
            pieces.append(match.group())
            position = match.end()
            sign = text[position : position + 1]
            if sign == quote:
                return "".join(pieces), position + 1
            if not sign:
                # `reached` stays here: other calls may follow. No string begins after it, so this happens once.
                raise Malformed("string without end", start)
            if sign != "\\":
                refuse_surrogates(text, position, position + 1)
                raise Malformed("control character in a string", position)
            piece, position = self._escape(text, position)
            pieces.append(piece)

    def _escape(self, text: str, position: int) -> tuple[str, int]:
        """Return the character of an escape sequence, and the position after it."""
        letter = text[position + 1 : position + 2]
        if letter in self.escapes:
            return self.escapes[letter], position + 2
        if letter in self.codes:
            code, end = self._code(text, position, letter)
            if 0xD800 <= code < 0xDC00 and text.startswith("\\u", end):
                low, after = self._code(text, end, "u")
                if 0xDC00 <= low < 0xE000:
                    return chr(0x10000 + ((code - 0xD800) << 10) + low - 0xDC00), after
            if 0xD800 <= code < 0xE000:
                raise Malformed("lone surrogate", position)
            if code > sys.maxunicode:
                raise Malformed("no character", position)
            return chr(code), end
        if self.keeps_backslash and letter and letter not in "01234567N\n\r":
            refuse_surrogates(text, position, position + 2)
            return text[position : position + 2], position + 2
        raise Malformed("unknown escape in a string", position)

    def _code(self, text: str, position: int, letter: str) -> tuple[int, int]:
        match = self.codes[letter].match(text, position + 2)
        if match is None:
            raise Malformed("unknown escape in a string", position)
        return int(match.group(), 16), match.end()


_HEXADECIMAL = {
    letter: re.compile(f"[0-9a-fA-F]{{{digits}}}")
    for letter, digits in (("u", 4), ("x", 2), ("U", 8))
}
_COMMON_ESCAPES = {
    '"': '"', "\\": "\\", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
}  # fmt: skip
_JSON_STRINGS = _Strings(
    escapes={**_COMMON_ESCAPES, "/": "/"},
    codes={"u": _HEXADECIMAL["u"]},
    plain={'"': re.compile('[^"\\\\\x00-\x1f\ud800-\udfff]*')},
    keeps_backslash=False,
)
_PYTHON_STRINGS = _Strings(
    escapes={**_COMMON_ESCAPES, "'": "'", "a": "\a", "v": "\v"},
    codes=_HEXADECIMAL,
    plain={quote: re.compile(f"[^{quote}\\\\\n\r\ud800-\udfff]*") for quote in "'\""},
    keeps_backslash=True,
)
_JSON_WORDS = {"true": True, "false": False, "null": None}

JSON = Notation(name="JSON", quotes=('"',), read_string=_JSON_STRINGS.read, words=_JSON_WORDS)
# LFM2's templates write strings and words as Python does, and those inside of arrays and objects as JSON.
PYTHON = Notation(
    name="Python literal",
    quotes=("'", '"'),
    read_string=_PYTHON_STRINGS.read,
    words={**_JSON_WORDS, "True": True, "False": False, "None": None},
)
