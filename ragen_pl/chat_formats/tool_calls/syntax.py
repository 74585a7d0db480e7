"""Parts of a call format, for the formats with markers around calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ragen_pl.chat_formats.tool_calls.scanned import ScannedText
from ragen_pl.chat_formats.tool_calls.values import Malformed, after_blanks

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters by name of the tool."""
NamedArguments = tuple[str, dict[str, Any]]
"""Name and arguments of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallBlock:
    """Calls that stand together, or text that is none.

    Attributes:
        calls: The calls; empty for text that is part of the answer.
        inside: Characters between the markers.
        end: Position after the closing marker.
    """

    calls: list[NamedArguments]
    inside: tuple[int, int]
    end: int


class CallSyntax(Protocol):
    """A format of calls."""

    def find(self, scanned: ScannedText, start: int) -> int:
        """Return where the next call may begin from `start` on, the length of the text if nowhere."""
        ...

    def read(self, scanned: ScannedText, start: int, tools: Tools) -> CallBlock:
        """Read the calls that begin at `start`, a position that `find` returned.

        Raises:
            Malformed: If they are not well formed.
        """
        ...

    def end_of_malformed(self, scanned: ScannedText, position: int) -> int:
        """Return where a malformed call ends, given the position up to which it was read."""
        ...


@dataclass(frozen=True, kw_only=True)
class MarkedCalls:
    """A format in which calls stand between two markers.

    Attributes:
        opening: Marker before the calls.
        closing: Marker after them.
        read_inside: Reads the calls from a position after the opening marker and its blanks; returns them and the
            position after them.
    """

    opening: str
    closing: str
    read_inside: Callable[[ScannedText, int, Tools], tuple[list[NamedArguments], int]]

    def find(self, scanned: ScannedText, start: int) -> int:
        """Return the position of the next opening marker."""
        return scanned.find(self.opening, start)

    def read(self, scanned: ScannedText, start: int, tools: Tools) -> CallBlock:
        """Read the calls between the markers."""
        inside = start + len(self.opening)
        calls, position = self.read_inside(scanned, after_blanks(scanned.text, inside), tools)
        end = after_blanks(scanned.text, position)
        expect(scanned.text, end, self.closing)
        return CallBlock(calls=calls, inside=(inside, end), end=end + len(self.closing))

    def end_of_malformed(self, scanned: ScannedText, position: int) -> int:
        """Return the end of the next closing marker, or the next opening marker if it is before it."""
        opening, closing = (
            scanned.find(marker, position) for marker in (self.opening, self.closing)
        )
        return min(opening, closing + len(self.closing), len(scanned.text))


def expect(text: str, position: int, marker: str) -> int:
    """Return the position after a marker that stands at a position.

    Raises:
        Malformed: If it does not stand there.
    """
    if not text.startswith(marker, position):
        raise Malformed(f"no {marker}", position)
    return position + len(marker)
