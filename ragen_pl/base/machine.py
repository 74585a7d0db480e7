"""Memory of the machine, and garbage collection and stacks of the process. torch is not imported here."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_QUERY = """
import json, sys, torch
indices = [int(index) for index in sys.argv[1:]] or range(torch.cuda.device_count())
print(json.dumps([[index, torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index)] for index in indices]))
"""
_QUERY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class GPUMemory:
    """Memory of a GPU."""

    index: int
    name: str
    free: int
    """Bytes that no process has in use."""
    total: int
    """All bytes."""


def gpu_memory(indices: Sequence[int] = ()) -> list[GPUMemory] | None:
    """Return the memory of GPUs; None where it cannot be found out.

    A process of its own asks, so that this one gets no CUDA context and may start others.

    Args:
        indices: Numbers of the GPUs among those that are visible; empty for all.
    """
    command = [sys.executable, "-c", _QUERY, *map(str, indices)]
    try:
        answer = subprocess.run(
            command, capture_output=True, check=True, text=True, timeout=_QUERY_SECONDS
        )
        return [GPUMemory(*gpu) for gpu in json.loads(answer.stdout)]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


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
    """Return the bytes that this process has in use after a garbage collection; None where the system does not tell.

    Pages of files, such as those of libraries, do not count: the system may take them back at any time.
    """
    gc.collect()
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    kilobytes = [
        int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))
    ]
    return sum(kilobytes) * 1024 if kilobytes else None


def resident_memory() -> int | None:
    """Return the bytes of this process in the machine's memory; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Leave the objects that exist now out of garbage collections, which take long where torch is imported."""
    if gc.get_freeze_count():
        # those of imports are left out already, and would no longer be after `unfreeze`
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collections while packages are imported, and leave torch and what came with it out of later ones.

    Imports make a million objects that stay. To look for garbage among them takes a fifth of the time of importing
    torch and Lightning. Where torch is there already, there may be garbage of earlier runs: all stays collectable.
    """
    if not gc.isenabled():
        yield
        return
    is_first = "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if is_first:
            gc.freeze()
            # nanobind reports what is not collected at the end as leaked
            atexit.register(gc.unfreeze)
        gc.enable()


def end_without_collection() -> None:
    """Leave out the search for garbage at the end of the process; to be registered with `atexit` before all others.

    It takes seconds where torch and Lightning are imported. Triton is made with nanobind, which would report each of
    triton's objects on stderr as leaked; nothing is written there any more.
    """
    gc.freeze()
    if "triton" in sys.modules and sys.__stderr__ is not None:
        sys.__stderr__.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno())


@contextmanager
def rarer_collections() -> Iterator[None]:
    """Look for garbage after 10,000 new objects, in place of Python's 700.

    A rollout makes some hundred thousand objects that stay until the update and are no garbage. To look through them
    again and again takes a seventh of the time of a scripted rollout.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(10_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def print_stacks() -> None:
    """Print the stacks of all threads of this process to stderr."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
