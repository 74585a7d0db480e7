"""Disks without room."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, *, kib: int) -> Iterator[Path]:
    """Yield a folder on a disk of its own; skip the test where mounts are not permitted.

    The disk is mounted at no path, and so is gone with this process, however that ends. Other processes of the user
    see the folder.

    Args:
        place: New folder, at which the disk is mounted for a moment.
        kib: Size of the disk in KiB.
    """
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no mounts are permitted")
    disk = os.open(place, os.O_RDONLY)
    try:
        subprocess.run(["umount", "-l", str(place)], check=True)
        yield Path(f"/proc/{os.getpid()}/fd/{disk}")
    finally:
        os.close(disk)
