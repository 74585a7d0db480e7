"""Time whole runs of the main job: seconds and iterations to a success, and the seconds of each phase.

Run `python benchmarks/time_to.py`: five seeds of `python -m ragen_pl.fit env=frozenlake_visual`, one after the other.
`--every 5` validates every five iterations for finer figures. Validations are outside the clock of `seconds to`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from timing import Stopwatch

from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.metrics.record import RecordReader
from ragen_pl.modules.agent import AgentModule

TARGETS = (0.90, 0.95, 0.97)
PHASES = (
    "start",
    "demonstrations",
    "warm start",
    "rollout",
    "scoring",
    "update",
    "validation",
    "summary",
)


class Clock(RolloutCallback):
    """Write the times that a run's own clock does not know as lines of JSON.

    Args:
        file: File that the lines are appended to.
    """

    in_warm_start = True

    def __init__(self, file: str) -> None:
        self.file, self.watch = file, Stopwatch(time.perf_counter)
        self._record("built")

    def _record(self, event: str, **values: float) -> None:
        with Path(self.file).open("a") as lines:
            lines.write(json.dumps({"event": event, "time": time.time(), **values}) + "\n")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the start of the warm start, or time the scoring of each iteration."""
        if not isinstance(pl_module, AgentModule):
            self._record("warm start")
            return
        self.watch.wrap(pl_module, "prepare", part="scoring")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the end of the warm start, or of reinforcement learning."""
        event = "learned" if isinstance(pl_module, AgentModule) else "warm started"
        self._record(event, **self.watch.take())


@dataclass
class Timed:
    """Seconds of a run by phase.

    Attributes:
        total: Seconds from the start of the process to its end.
        seconds: Seconds by phase.
        reached: Seconds without validations and iterations to each target that was reached.
        success: Success of each validation by the number of iterations before it.
        metrics: The run's last metrics.
    """

    total: float
    seconds: dict[str, float] = field(default_factory=dict)
    reached: dict[float, tuple[float, int]] = field(default_factory=dict)
    success: dict[int, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def timed_run(overrides: list[str], *, seed: int) -> Timed:
    """Run the job of a seed and return its times."""
    with tempfile.TemporaryDirectory() as folder:
        events, run = Path(folder) / "events", Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "ragen_pl.fit", "env=frozenlake_visual", f"seed={seed}", f"paths.run_dir={run}"),
            *(f"paths.root={folder}", "+callbacks.clock._target_=time_to.Clock", f"+callbacks.clock.file={events}"),
            *overrides,
        ]  # fmt: skip
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        began = time.time()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        ended = time.time()
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        lines = [json.loads(line) for line in events.read_text().splitlines()]
        result = analysed(lines, RecordReader(run), began=began, ended=ended)
        result.metrics = json.loads((run / "metrics.json").read_text())
    return result


def analysed(
    lines: list[dict[str, Any]], record: RecordReader, *, began: float, ended: float
) -> Timed:
    """Return the times of a run.

    Args:
        lines: Those of `Clock`.
        record: The run's record, with the seconds of each iteration.
        began: Time of the start of the process.
        ended: Time of its end.
    """
    at = {line["event"]: line for line in reversed(lines)}
    times = {event: line["time"] for event, line in at.items()}
    rows = record.rows()
    seconds = {
        phase: sum(row.get(f"time/{phase}_s", 0.0) for row in rows)
        for phase in ("rollout", "update", "validation")
    }
    # scoring is a part of the rollout phase
    seconds |= {
        "start": times["built"] - began,
        "demonstrations": times["warm start"] - times["built"],
        "warm start": times["warm started"] - times["warm start"],
        "scoring": at["learned"]["scoring"],
        "rollout": seconds["rollout"] - at["learned"]["scoring"],
        "summary": ended - times["learned"],
    }
    result = Timed(ended - began, seconds)
    for point in record.points():
        if (success := point.metrics.get("val/success")) is None or point.time is None:
            continue
        result.success[point.step] = success
        done = (row for row in rows if row["iteration"] <= point.step)
        elapsed = point.time - began - sum(row.get("time/validation_s", 0.0) for row in done)
        for target in TARGETS:
            if success >= target and target not in result.reached:
                result.reached[target] = (elapsed, point.step)
    return result


def row(name: str, values: list[float], *, digits: int = 1) -> str:
    """Return a row of a table: mean, and the values of all seeds."""
    mean = statistics.fmean(values)
    return (
        f"| {name} | {mean:.{digits}f} | "
        + " | ".join(f"{value:.{digits}f}" for value in values)
        + " |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--every", type=int, help="validate every so many iterations")
    parser.add_argument(
        "overrides", nargs="*", help="config overrides, such as trainer.max_epochs=200"
    )
    args = parser.parse_args()
    every = [] if args.every is None else [f"trainer.check_val_every_n_epoch={args.every}"]
    runs = [timed_run([*every, *args.overrides], seed=seed) for seed in args.seeds]
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n"
    )
    print("| | mean | " + " | ".join(f"seed {seed}" for seed in args.seeds) + " |")
    print("|---|" + "---|" * (1 + len(runs)))
    for iterations in sorted(set.intersection(*(set(run.success) for run in runs))):
        name = f"success after {iterations} iterations" if iterations else "success before RL"
        print(row(name, [run.success[iterations] for run in runs], digits=3))
    print(row("success", [run.metrics["val/success"] for run in runs], digits=3))
    print(
        row(
            "success, blank images", [run.metrics["blank_images/success"] for run in runs], digits=3
        )
    )
    print(row("total, s", [run.total for run in runs]))
    for target in TARGETS:
        cells = [
            f"{run.reached[target][0]:.0f} ({run.reached[target][1]})"
            if target in run.reached
            else "-"
            for run in runs
        ]
        print(f"| seconds (iterations) to {target:.2f} | | " + " | ".join(cells) + " |")
    for phase in PHASES:
        print(row(f"{phase}, s", [run.seconds[phase] for run in runs]))
    rest = [run.total - sum(run.seconds.values()) for run in runs]
    print(row("other, s", rest))


if __name__ == "__main__":
    main()
