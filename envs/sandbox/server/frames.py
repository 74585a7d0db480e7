"""Frames of the server's protocol: four bytes of length, then as many bytes of JSON."""

from __future__ import annotations

import os
import struct


def forward_frame(source: int, target: int) -> None:
    """Move a frame from one pipe to another without reading it; drop it if nobody reads the other.

    Raises:
        SystemExit: The other end of the source has been closed.
    """
    header = _read_exactly(source, 4)
    (left,) = struct.unpack("!I", header)
    try:
        os.write(target, header)
        while left:
            moved = os.splice(source, target, left)
            if not moved:
                raise SystemExit
            left -= moved
    except BrokenPipeError:
        _read_exactly(source, left)


def read_frame(descriptor: int) -> bytes:
    """Read a frame.

    Raises:
        SystemExit: The other end has been closed.
    """
    (length,) = struct.unpack("!I", _read_exactly(descriptor, 4))
    return _read_exactly(descriptor, length)


def _read_exactly(descriptor: int, count: int) -> bytes:
    text = b""
    while len(text) < count:
        part = os.read(descriptor, count - len(text))
        if not part:
            raise SystemExit
        text += part
    return text


def write_frame(descriptor: int, text: bytes) -> None:
    """Write a frame."""
    frame = struct.pack("!I", len(text)) + text
    while frame:
        frame = frame[os.write(descriptor, frame) :]
