"""Files that are complete whenever they exist, and temporary folders that a killed process does not leave for good."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PARTIAL = ".partial"
"""End of the name of a file that is being written."""

_LOCK = "lock"


class OwnFolder:
    """A temporary folder of this process.

    It is removed when the process ends. Where the process is killed, it is left: a lock on a file of the folder ends
    with the process, and folders of the same place and prefix without one are removed by the next that is made there.

    Args:
        prefix: First part of its name.
        place: Folder that it is made in; None for that of temporary files.
    """

    def __init__(self, prefix: str, *, place: str | Path | None = None) -> None:
        place = Path(place or tempfile.gettempdir())
        for folder in place.glob(f"{prefix}*"):
            _remove_if_left(folder)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        unlocked = self.path / "unlocked"
        self._lock = unlocked.open("w")
        # a file system without locks keeps folders
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # only a locked file has the name that others look for
            unlocked.replace(self.path / _LOCK)
        self._finalizer = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def remove(self) -> None:
        """Remove it with all that it contains."""
        self._finalizer()


def _remove(folder: Path, lock: IO[str], owner: int) -> None:
    # a fork has the folder of another process
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def _remove_if_left(folder: Path) -> None:
    """Remove a folder that no process holds; leave it where that is unknown."""
    with suppress(OSError), (folder / _LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def disk_errors_of(path: Path) -> Iterator[None]:
    """Let a disk's error in the block name the file. That of a write, such as to a full disk, names none by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_write(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path` and rename it to `path` at the end of the block.

    A process that is killed inside the block leaves `path` as it was.

    Args:
        path: The file to write. Its folder must exist.
        durable: Wait until the disk has the file, which then outlives a machine that loses power.
    """
    partial = path.with_name(f"{path.name}{PARTIAL}")
    try:
        with disk_errors_of(path):
            yield partial
            if durable:
                _synchronize(partial)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)
    if durable:
        # the new name is an entry of the folder
        _synchronize(path.parent)


def _synchronize(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
