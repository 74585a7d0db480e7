"""Training runs of the benchmarks: each a process of `python -m ragen_pl.fit` with a folder, a log and its cost."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_COST = "cost.jsonl"
# no output but the log's, and no store, pages or summaries that a benchmark reads
QUIET = ("logger=none", "callbacks.progress=null", "callbacks.trajectories=null")


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of all starts of a run, those that were interrupted too.

    Attributes:
        seconds: Seconds from start to end.
        processor_seconds: Processor time of the process and of those that it has started.
    """

    seconds: float
    processor_seconds: float


def fit(folder: Path, *overrides: str) -> bool:
    """Start a run, or continue it, unless it has ended; print a line with its cost, and return whether it has ended.

    It computes on one thread. Its output goes to `log.txt` in the folder.
    """
    if is_finished(folder):
        return True
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "ragen_pl.fit", *overrides),
        *(f"paths.run_dir='{folder}'", "ckpt_path=auto"),
    ]
    # arms may name engines of the tests
    paths = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    began = time.time()
    with (folder / "log.txt").open("a") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": paths},
        )  # fmt: skip
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    with (folder / _COST).open("a") as costs:
        spent = {"seconds": time.time() - began, "processor_seconds": used.ru_utime + used.ru_stime}
        costs.write(json.dumps(spent) + "\n")
    cost = cost_of(folder)
    ended = "done" if is_finished(folder) else f"exit code {process.returncode}, see log.txt"
    print(
        f"{folder}: {ended}, {cost.processor_seconds:.0f} processor seconds, {cost.seconds:.0f} s",
        flush=True,
    )
    return is_finished(folder)


def run_or_report(
    description: str, *, folder: str, experiments: Sequence[str] = ()
) -> argparse.Namespace:
    """Read the command line of a benchmark that runs arms and prints tables.

    Args:
        description: Docstring of the benchmark.
        folder: Folder of its runs below `runs`.
        experiments: Names of its experiments, where it has several.

    Returns:
        `action`, `out`, `seeds` and, with several experiments, those `experiments` that were named.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("action", nargs="?", choices=("run", "report"), default="run")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / folder)
    parser.add_argument("--seeds", type=int, default=3)
    if experiments:
        parser.add_argument(
            "--experiments", nargs="+", choices=experiments, default=list(experiments)
        )
    return parser.parse_args()


def is_finished(folder: Path) -> bool:
    """Return whether a run has come to its end. Its summary, which comes last, has the time of the whole run."""
    metrics = folder / "metrics.json"
    return metrics.exists() and "time/total_s" in json.loads(metrics.read_text())


def cost_of(folder: Path) -> Cost:
    """Return the costs of a run so far."""
    file = folder / _COST
    starts = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return Cost(
        *(sum(start[name] for start in starts) for name in ("seconds", "processor_seconds"))
    )
