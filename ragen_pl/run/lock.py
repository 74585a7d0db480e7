"""A lock on a run's folder. Two runs in one folder would write over each other's checkpoints."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from datetime import datetime
from pathlib import Path
from typing import IO

from ragen_pl.config.errors import ConfigError

log = logging.getLogger(__name__)
_FILE = "run.lock"
_TAKEN = (errno.EAGAIN, errno.EACCES)


def hold(folder: Path) -> IO[str]:
    """Lock a run's folder for as long as the returned file is open and this process lives.

    The lock is the kernel's: a process that is killed leaves none. Children do not inherit it.

    Args:
        folder: The run's folder.

    Raises:
        ConfigError: Another process has locked it.
    """
    file = (folder / _FILE).open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            holder = _holder(file)
            file.close()
            raise ConfigError(
                f"paths.run_dir={folder}: {holder} trains in it; wait for its end, or set another folder"
            ) from error
        log.warning(
            f"{folder}: its file system has no locks ({error.strerror}); no two runs may use the folder at once"
        )
        return file
    file.truncate(0)
    json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}, file)
    file.flush()
    return file


def _now() -> str:
    return datetime.now().isoformat(sep=" ", timespec="seconds")


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        holder = json.load(file)
        return f"process {holder['pid']} on {holder['host']} (since {holder['since']})"
    except (ValueError, KeyError, TypeError):  # it is just being written
        return "another process"
