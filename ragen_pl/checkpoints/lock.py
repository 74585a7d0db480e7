"""Locks of files. Two runs in one folder would write over each other's checkpoints."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

from ragen_pl.config.errors import ConfigError

log = logging.getLogger(__name__)
FILE = "run.lock"
# C's `struct flock`
if sys.platform == "darwin":
    _FLOCK, _FLOCK_FIELDS = "qqihh", ("l_start", "l_len", "l_pid", "l_type", "l_whence")
else:
    _FLOCK, _FLOCK_FIELDS = "hhqqi4x", ("l_type", "l_whence", "l_start", "l_len", "l_pid")
_TAKEN = (errno.EAGAIN, errno.EACCES)


def hold(folder: Path) -> IO[str]:
    """Lock a run's folder for as long as the returned file is open and this process lives.

    The lock is the kernel's: a process that is killed leaves none. Children do not inherit it.

    Args:
        folder: The run's folder.

    Raises:
        ConfigError: Another process has locked it.
    """
    file = (folder / FILE).open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            holder = _holder(file)
            file.close()
            raise ConfigError(
                f"paths.run_dir={folder}: {holder} trains in it; wait for its end, or set another folder"
            ) from error
        _warn_without_locks(folder, error)
        return file
    file.truncate(0)
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}, file)
    file.flush()
    return file


@contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Run the block while no other process runs one with the same file, and wait for it where one does.

    Args:
        file: File that is locked. It is created and stays.
    """
    with file.open("a") as stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX)
        except OSError as error:
            _warn_without_locks(file.parent, error)
        yield


def is_held(folder: Path) -> bool:
    """Return whether another process holds the lock of a run's folder.

    The kernel is asked and no lock is taken, which could refuse a run that begins. A process that holds the lock itself
    may not ask: its lock would end.
    """
    file = folder / FILE
    if not file.is_file():
        return False
    wanted = {"l_type": fcntl.F_WRLCK, "l_whence": os.SEEK_SET}
    question = struct.pack(_FLOCK, *(wanted.get(name, 0) for name in _FLOCK_FIELDS))
    try:
        with file.open("rb") as stream:
            answer = fcntl.fcntl(stream, fcntl.F_GETLK, question)
    except OSError:  # unreadable, or a file system without locks
        return False
    answered = struct.unpack_from(_FLOCK, answer)
    return answered[_FLOCK_FIELDS.index("l_type")] != fcntl.F_UNLCK


def _warn_without_locks(folder: Path, error: OSError) -> None:
    log.warning(
        f"{folder}: its file system has no locks ({error.strerror}); no two runs may use the folder at once"
    )


def _now() -> str:
    return datetime.now().isoformat(sep=" ", timespec="seconds")


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        holder = json.load(file)
        return f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
    except (ValueError, KeyError, TypeError, RecursionError):  # it is just being written
        return "another process"
