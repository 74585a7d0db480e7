"""The judge of measurements: whether what a run occupies grows from the middle third of its time to the last one."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

MIB = 2**20
Measurement = dict[str, float]

# memory of a process may grow by this between the thirds: a share, and bytes
_SHARE, _BYTES = 0.01, 4 * MIB
_OBJECTS_PER_ITERATION = 10
_BYTES_PER_POINT = 350
# no third has fewer measurements
_FEWEST = 3
# iterations in which a process starts threads, opens files and imports what its first validations and plots need
_START = 20


def findings(measured: Sequence[Measurement]) -> list[tuple[str, float, float, bool]]:
    """Return for each quantity its name, its value, the largest value that passes, and whether it passes.

    The first iterations of the process are left out. Threads, descriptors and shared memory change within a moment (a
    connection is opened and closed), so that the least value of a third is that of an equal phase.

    Args:
        measured: In order. Those of the last process are looked at, which began before a third of the time.

    Raises:
        ValueError: There are too few.
    """
    own = [one for one in measured if one["process"] == measured[-1]["process"]]
    own = [one for one in own if one["iteration"] >= own[0]["iteration"] + _START]
    count = len(own) // 2
    if count < _FEWEST:
        raise ValueError(
            f"{len(own)} measurements of the last process after its first {_START} iterations, expected "
            f"{2 * _FEWEST} or more; let it run for longer"
        )
    middle, last = own[-2 * count : -count], own[-count:]

    def medians(name: str) -> tuple[float, float]:
        return median(one[name] for one in middle), median(one[name] for one in last)

    found = []
    for name in ("memory", "memory_of_children"):
        before, after = medians(name)
        most = before * (1 + _SHARE) + _BYTES
        found.append((f"{name}, MiB", after / MIB, most / MIB, after <= most))
    iterations = last[-1]["iteration"] - middle[0]["iteration"]
    before, after = medians("objects")
    # between the medians lies half of the iterations of both thirds
    growth = (after - before) / (iterations / 2)
    found.append(
        ("objects an iteration", growth, _OBJECTS_PER_ITERATION, growth < _OBJECTS_PER_ITERATION)
    )
    for name in ("threads", "descriptors", "shared", "children"):
        before, after = (min(one[name] for one in third) for third in (middle, last))
        found.append((f"least {name}", after, before, after <= before))
    points = last[-1]["points"] - middle[0]["points"]
    grown = last[-1]["database"] - middle[0]["database"]
    size = grown / max(points, 1)
    found.append(("database, bytes a point", size, _BYTES_PER_POINT, size < _BYTES_PER_POINT))
    return found
