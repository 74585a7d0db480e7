"""Files of JSON lines that are appended whole, such as a run's record of metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ragen_pl.base.files import disk_errors_of
from ragen_pl.base.foreign_files import check_plain


class LinesFile:
    """A file of JSON lines. Each is written at once, so that a killed process loses none but the one it is writing.

    Args:
        path: The file. It is continued if it is there, without a last line that a killed process has cut.

    Raises:
        ForeignFileError: It is a link or no plain file.
    """

    def __init__(self, path: Path) -> None:
        check_plain(path)
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        _drop_cut_line(path)
        self.size = path.stat().st_size

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line.

        Raises:
            OSError: It cannot be written, such as to a full disk. The lines before it are whole.
        """
        text = json.dumps(line, allow_nan=False).encode() + b"\n"
        # unbuffered: what a full disk has not taken is not written later, after other lines
        with disk_errors_of(self.path), self.path.open("ab", buffering=0) as file:
            try:
                written = 0
                while written < len(text):
                    written += file.write(text[written:])
            except OSError:
                file.truncate(self.size)
                raise
        self.size += len(text)

    def synchronize(self) -> None:
        """Wait until the disk has all lines."""
        with self.path.open("ab") as file:
            os.fsync(file.fileno())


def whole_lines(path: Path, *, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file and the byte that each begins at. A last one that is not whole is left out.

    Args:
        path: The file, which need not exist.
        start: Byte that the first line begins at.
    """
    if not path.is_file() or start >= path.stat().st_size:
        return
    with path.open("rb") as stream:
        stream.seek(start)
        for line in stream:
            if not line.endswith(b"\n"):
                return  # a writer may add the rest, which is no line of its own
            yield start, line
            start += len(line)


def _drop_cut_line(path: Path) -> None:
    end = path.stat().st_size
    with path.open("rb+") as stream:
        while end:
            stream.seek(end - 1)
            if stream.read(1) == b"\n":
                break
            end -= 1
        stream.truncate(end)
