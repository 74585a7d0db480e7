"""Measure a process that leaks each of what the judge looks at, one after the other, and print what fails."""

from __future__ import annotations

import gc
import json
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from soak.soak_judge import findings
from soak.soak_meter import SoakMeter
from soak.soak_services import lines_of

MEASUREMENTS, EVERY = 12, 10
CHILD = (
    "import sys; held = []\nfor line in sys.stdin: held.append(b'x' * 2**20); print(1, flush=True)"
)


class Leaks:
    """Resources that grow, measured in a folder.

    Args:
        folder: Gets the store, the folder in place of shared memory, and the measurements.
    """

    def __init__(self, folder: Path) -> None:
        self.store, self.shared, self.folder = folder / "mlflow.db", folder / "shared", folder
        self.shared.mkdir()
        self.held: list[object] = []
        self.connection = sqlite3.connect(self.store)
        self.connection.execute(
            "CREATE TABLE metrics (key TEXT, value REAL, timestamp INTEGER, step INTEGER)"
        )
        self.child = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.kinds: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "memory": lambda: self.held.append(bytearray(b"x") * 2**22),
            "memory_of_children": self.grow_child,
            "objects": lambda: self.held.extend([] for _ in range(200)),
            "threads": self.start_thread,
            "descriptors": lambda: self.held.append(open("/dev/null")),  # noqa: SIM115
            "shared": self.write_shared,
            "children": lambda: self.held.append(subprocess.Popen(["sleep", "600"])),
            "database": lambda: self.add_points("x" * 1000),
        }

    def start_thread(self) -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def write_shared(self) -> None:
        with tempfile.NamedTemporaryFile(dir=self.shared, delete=False) as file:
            file.write(b"x")

    def grow_child(self) -> None:
        assert self.child.stdin and self.child.stdout
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        self.child.stdout.readline()

    def add_points(self, name: str) -> None:
        rows = [(f"{name}{number}", 0.5, 0, number) for number in range(10)]
        self.connection.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)
        self.connection.commit()

    def failing(self, kind: str) -> list[str]:
        """Let something grow, and return what the judge finds."""
        file = self.folder / f"{kind}.jsonl"
        meter = SoakMeter(file=str(file), store=str(self.store), shared=str(self.shared))
        for iteration in range(MEASUREMENTS):
            self.kinds[kind]()
            self.add_points("rollout/some_metric_")
            meter.measure(EVERY * iteration)
        return [name for name, _, _, passes in findings(list(lines_of(file))) if not passes]

    def end(self) -> None:
        processes = [one for one in self.held if isinstance(one, subprocess.Popen)]
        for process in (*processes, self.child):
            process.kill()
            process.wait()


if __name__ == "__main__":
    # a measurement takes long where there are a million objects; those of the imports are left out
    gc.freeze()
    leaks = Leaks(Path.cwd())
    try:
        print(json.dumps({kind: leaks.failing(kind) for kind in leaks.kinds}))
    finally:
        leaks.end()
