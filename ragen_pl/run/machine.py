"""Memory of the machine. torch is not imported here."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def free_host_memory() -> int | None:
    """Return the bytes of free memory that this process may use; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    limits = [free * 1024]
    # of a container
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        limits.append(int(limit) - int(used))
    return min(limits)


def used_memory() -> int | None:
    """Return the bytes of memory that this process has in use; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
