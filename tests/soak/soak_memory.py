"""Run a tiny run for a while, and tell whether what it occupies grows: `make soak-memory`.

    make soak-memory ARGS="--minutes 30"

The run's environments are in processes of their own and play on a server, which is killed and started again every 100
iterations. A double of a vLLM server samples, and is restarted every 150. MLflow writes into a sqlite file, and a
checkpoint is written every 10 iterations. Shortly before a third of the time is over the run is stopped by SIGTERM and
resumed, so that the measurements that are compared are of one process. Further arguments are overrides of the run.
"""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from soak.soak_judge import MIB, Measurement, findings
from soak.soak_services import LIMIT_S, SETTINGS, Ranks, end, lines_of, services, unsent

STOPPED = 143


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="time of the run")
    parser.add_argument("--every", type=int, default=10, help="iterations between measurements")
    parser.add_argument(
        "--restarts", type=int, nargs=2, default=(100, 150), metavar=("ENVIRONMENTS", "SAMPLER"),
        help="iterations between restarts of each server",
    )  # fmt: skip
    parser.add_argument("--folder", type=Path, help="kept; default a new one, removed if it passes")
    arguments, overrides = parser.parse_known_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="soak_memory_"))
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    measured = run(
        folder,
        minutes=arguments.minutes,
        every=arguments.every,
        restarts=arguments.restarts,
        overrides=overrides,
    )
    problems = report(measured) + unsent(folder)
    end(problems, folder, keep=arguments.folder is not None)
    print("passed")


def run(
    folder: Path, *, minutes: float, every: int, restarts: Sequence[int], overrides: Sequence[str]
) -> list[Measurement]:
    """Run for so many minutes, and return the measurements."""
    file = folder / "measured.jsonl"
    shared = Path(tempfile.mkdtemp(prefix="soak_memory_", dir="/dev/shm"))
    try:
        with services(folder) as (player, environments):
            settings = (
                *SETTINGS,
                f"env.kwargs.urls=[{environments.url}]",
                f"rollout.engine.urls=[{player.url}]",
                f"rollout.engine.weights_folder={shared}",
                f"paths.root={folder}",
                f"paths.run_dir={folder / 'run'}",
                "trainer.max_epochs=1000000",
                f"trainer.check_val_every_n_epoch={every}",
                "callbacks.checkpoint.every_n_epochs=10",
                "+callbacks.meter._target_=soak.soak_meter.SoakMeter",
                f"+callbacks.meter.file={file}",
                f"+callbacks.meter.store={folder / 'mlflow.db'}",
                f"+callbacks.meter.shared={shared}",
                f"+callbacks.meter.every_n_iterations={every}",
                *overrides,
            )
            ranks = Ranks(settings, folder=folder)
            restarted = [0, 0]
            iteration, resumed, begun = 0, False, math.inf
            try:
                while time.monotonic() < begun + 60 * minutes:
                    if ranks.codes != [None]:
                        raise RuntimeError(f"the run has ended early:\n{ranks.tail()}")
                    if begun == math.inf and file.exists():
                        begun = time.monotonic()
                    if not resumed and time.monotonic() > begun + 18 * minutes:
                        stop(ranks)
                        ranks, resumed = Ranks(settings, folder=folder, name="resumed"), True
                    iteration = max((one["iteration"] for one in lines_of(file)), default=0)
                    for number, service in enumerate((environments, player)):
                        due = iteration // restarts[number]
                        if due > restarted[number]:
                            restarted[number] = due
                            service.kill()
                            service.start()
                    time.sleep(0.2)
                stop(ranks)
            finally:
                ranks.kill()
    finally:
        shutil.rmtree(shared)
    print(
        f"{iteration} iterations; restarts of the environments and of the vLLM double: {restarted}"
    )
    return list(lines_of(file))


def stop(ranks: Ranks) -> None:
    """Stop a run by SIGTERM, as before the end of a job's time."""
    ranks.processes[0].send_signal(signal.SIGTERM)
    if ranks.join(limit_s=LIMIT_S) != [STOPPED]:
        raise RuntimeError(f"the run did not stop as it should:\n{ranks.tail()}")


def report(measured: Sequence[Measurement]) -> list[str]:
    """Print the findings and return those that fail."""
    problems = []
    for one in (
        measured[0],
        measured[len(measured) // 3],
        measured[2 * len(measured) // 3],
        measured[-1],
    ):
        print(
            f"iteration {one['iteration']}: {one['memory'] / MIB:.1f} MiB and {one['kept'] / MIB:.1f} freed, "
            f"children {one['memory_of_children'] / MIB:.1f} MiB in {one['children']}, {one['objects']} objects, "
            f"{one['threads']} threads, {one['descriptors']} descriptors, {one['shared'] / MIB:.2f} MiB shared, "
            f"database {one['database'] / MIB:.1f} MiB with {one['points']} points"
        )
    for name, value, most, passes in findings(measured):
        line = f"{name}: {value:.1f}, at most {most:.1f}"
        print(line)
        if not passes:
            problems.append(line)
    return problems


if __name__ == "__main__":
    main()
