"""Output of a process, read within limits; and the state of a process."""

from __future__ import annotations

import os
import resource
import select
import time

from .child import Child

# between two looks at a child that has not answered
_LOOK_S = 0.05
TOO_LONG = b'{"starts": true, "error": "takes too long"}'
"""Result of a program that takes too long."""
_TOO_MUCH = b'{"starts": true, "error": "output is too long"}'


class Output:
    """The lines that a child writes.

    Args:
        child: The process.
        seconds: Longest time until the last line.
        waiting_seconds: Longest time that the process may wait for something. It can only wait for what never comes,
            such as a lock: it has no threads, and its request is there.
        max_bytes: Largest number of bytes.
    """

    def __init__(
        self, child: Child, *, seconds: float, waiting_seconds: float, max_bytes: int
    ) -> None:
        self.child, self.left = child, max_bytes
        self.end = time.monotonic() + seconds
        self.looks = round(waiting_seconds / _LOOK_S)
        self.text, self.ended = b"", False

    def line(self) -> bytes:
        """Return the next line; at the end of the output its unfinished part, or the reason why there is none."""
        while b"\n" not in self.text:
            part = os.read(self.child.result, 1 << 16) if self._comes() else None
            self.left -= len(part or b"")
            if not part or self.left < 0:
                self.ended = True
                return self.text if part == b"" else _TOO_MUCH if part else TOO_LONG
            self.text += part
        line, _, self.text = self.text.partition(b"\n")
        return line

    def _comes(self) -> bool:
        """Wait for something to read; return False where it takes too long."""
        while not select.select([self.child.result], [], [], _LOOK_S)[0]:
            # whether it waits does not depend on what else the machine does
            self.looks -= process_state(self.child.pid) == "S"
            if self.looks <= 0 or time.monotonic() > self.end:
                return False
        return True


def process_state(pid: int) -> str:
    """Return the letter of a process's state: S of one that waits, R of one that computes or would."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as values:
        return values.read().rpartition(")")[2].split()[0]


def address_space(pid: int) -> int:
    """Return the address space of a process in bytes; 0 of a zombie."""
    with open(f"/proc/{pid}/statm") as sizes:
        return int(sizes.read().split()[0]) * resource.getpagesize()
