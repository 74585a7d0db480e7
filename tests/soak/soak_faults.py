"""Disturb a tiny run by random faults, and tell whether it ends as an undisturbed one does: `make soak-faults`.

    make soak-faults ARGS="--iterations 1000"

Two ranks play on a server of environments, by environments in processes of their own, and a double of a vLLM server
samples; its answers depend on the weights that it has got. A fault comes every few iterations, of kinds that take
turns in random order: a rank, an environment or a server is killed, a rank or a server is frozen for seconds, a rank
gets SIGTERM, no file can be written (RLIMIT_FSIZE), MLflow's store is locked. A run that has ended is started again
and resumes. Further arguments are overrides of the run.
"""

from __future__ import annotations

import argparse
import random
import resource
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
from soak.soak_services import (
    LIMIT_S,
    SETTINGS,
    EnvironmentService,
    PlayerService,
    Ranks,
    end,
    lines_of,
    points_of,
    services,
    unsent,
)
from support.machines.machine_runs import final_weights

RANKS = 2
# longest time without a new iteration, the start of the ranks included
STALL_S = 900.0
KINDS = (
    "rank killed", "rank stopped", "rank frozen", "environment killed", "sampler killed", "sampler frozen",
    "environments killed", "environments frozen", "disk full", "MLflow away",
)  # fmt: skip
# metrics of the faults themselves
_OF_FAULTS = (
    "retried", "failed_infrastructure", "failed_attempts", "failed_turns", "replayed_steps", "resent",
)  # fmt: skip


class Disturbed:
    """A run that is disturbed, and started again whenever it has ended.

    Args:
        folder: Folder of the run and its output.
        settings: Overrides.
        seed: Decides the faults.
        every: Iterations from one fault to the next, on average.
        kinds: Kinds of faults, of `KINDS`.
    """

    def __init__(
        self,
        folder: Path,
        settings: Sequence[str],
        *,
        player: PlayerService,
        environments: EnvironmentService,
        seed: int,
        every: int,
        kinds: Sequence[str] = KINDS,
    ) -> None:
        self._folder, self._settings, self._rng = folder, settings, random.Random(seed)
        self._every, self._kinds = every, kinds
        self._faults: dict[str, Callable[[], AbstractContextManager[None]]] = {
            "rank killed": partial(self._signalled, signal.SIGKILL),
            "rank stopped": partial(self._signalled, signal.SIGTERM),
            "rank frozen": self._rank_frozen,
            "environment killed": self._environment_killed,
            "sampler killed": partial(_restarted, player),
            "sampler frozen": partial(_frozen, player),
            "environments killed": partial(_restarted, environments),
            "environments frozen": partial(_frozen, environments),
            "disk full": self._disk_full,
            "MLflow away": self._store_locked,
        }
        self._next: list[str] = []
        self.counts: Counter[str] = Counter()
        self.starts = 0
        self.endings: Counter[str] = Counter()

    def run(self, *, iterations: int) -> None:
        """Run to the end.

        Raises:
            RuntimeError: It has ended without a fault, or goes on no more.
        """
        due, fault, acted = self._interval(), None, 0
        self._ranks = self._start()
        try:
            last, changed = -1, time.monotonic()
            while True:
                iteration = progress(self._folder)
                if iteration != last:
                    last, changed = iteration, time.monotonic()
                if iteration > acted + 1:
                    # whatever comes now is not its work
                    fault = None
                if time.monotonic() > changed + STALL_S:
                    raise RuntimeError(f"no progress after {fault}:\n{self._ranks.tail()}")
                if any(code is not None for code in self._ranks.codes):
                    codes = self._ranks.join(limit_s=LIMIT_S)
                    if codes == [0] * RANKS:
                        return
                    if fault is None:
                        raise RuntimeError(f"it has ended without a fault:\n{self._ranks.tail()}")
                    self.endings[f"{fault}: {sorted(codes)}"] += 1
                    print(
                        f"  iteration {iteration}, {fault}: {self._ranks.last_line()}", flush=True
                    )
                    fault, self._ranks = None, self._start()
                elif due <= iteration < iterations - 1:
                    fault, acted = self._draw(), iteration
                    self.counts[fault] += 1
                    print(f"iteration {iteration}: {fault}", flush=True)
                    # a rank may end meanwhile
                    with suppress(psutil.NoSuchProcess), self._faults[fault]():
                        time.sleep(self._rng.uniform(0.5, 5.0))
                    due = iteration + self._interval()
                time.sleep(0.1)
        finally:
            self._ranks.kill()

    def _start(self) -> Ranks:
        self.starts += 1
        name = f"start_{self.starts}"
        return Ranks(self._settings, folder=self._folder, count=RANKS, name=name, forked=True)

    def _interval(self) -> int:
        return self._rng.randint(1, 2 * self._every - 1)

    def _draw(self) -> str:
        if not self._next:
            self._next = self._rng.sample(self._kinds, len(self._kinds))
        return self._next.pop()

    def _rank(self) -> psutil.Process:
        return self._rng.choice(self._ranks.processes)

    @contextmanager
    def _signalled(self, number: signal.Signals):
        self._rank().send_signal(number)
        yield

    @contextmanager
    def _rank_frozen(self):
        rank = self._rank()
        rank.suspend()
        yield
        rank.resume()

    @contextmanager
    def _environment_killed(self):
        children = self._rank().children()
        if children:
            self._rng.choice(children).kill()
        yield

    @contextmanager
    def _disk_full(self):
        for rank in self._ranks.processes:
            rank.rlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        yield
        for rank in self._ranks.processes:
            if rank.is_running():
                rank.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

    @contextmanager
    def _store_locked(self):
        connection = sqlite3.connect(self._folder / "mlflow.db", isolation_level=None, timeout=60)
        try:
            connection.execute("BEGIN EXCLUSIVE")
            yield
        finally:
            connection.close()


@contextmanager
def _restarted(service: PlayerService | EnvironmentService):
    service.kill()
    yield
    service.start()


@contextmanager
def _frozen(service: PlayerService | EnvironmentService):
    service.freeze()
    yield
    service.thaw()


def progress(folder: Path) -> int:
    """Return the last iteration that the first rank has played, -1 for none."""
    return max((line["iteration"] for line in lines_of(folder / "rank_0.jsonl")), default=-1)


def undisturbed(folder: Path, settings: Sequence[str]) -> None:
    """Run to the end without faults."""
    ranks = Ranks(settings, folder=folder, count=RANKS, forked=True)
    try:
        last, changed = -1, time.monotonic()
        while None in ranks.codes:
            if (iteration := progress(folder)) != last:
                last, changed = iteration, time.monotonic()
            if time.monotonic() > changed + STALL_S:
                raise RuntimeError(f"no progress:\n{ranks.tail()}")
            time.sleep(0.2)
    finally:
        ranks.kill()
    if ranks.codes != [0] * RANKS:
        raise RuntimeError(f"it has ended with {ranks.codes}:\n{ranks.tail()}")


def played(folder: Path) -> dict[tuple[int, int], set[str]]:
    """Return the digests of each rank's trajectories of each iteration."""
    found: dict[tuple[int, int], set[str]] = {}
    for rank in range(RANKS):
        for line in lines_of(folder / f"rank_{rank}.jsonl"):
            found.setdefault((line["iteration"], rank), set()).add(line["digest"])
    return found


def differences(whole: Path, disturbed: Path) -> list[str]:
    """Return in what the disturbed run differs from the whole one."""
    problems = []
    expected, found = played(whole), played(disturbed)
    if changed := sorted(key for key in expected | found if expected.get(key) != found.get(key)):
        problems.append(
            f"trajectories of {len(changed)} rollouts, first (iteration, rank) {changed[0]}"
        )
    if final_weights(whole / "run") != final_weights(disturbed / "run"):
        problems.append("the final weights")
    before, after = (_comparable(folder / "mlflow.db") for folder in (whole, disturbed))
    if wrong := sorted(key for key in before | after if before.get(key) != after.get(key)):
        problems.append(f"{len(wrong)} of {len(before)} points in MLflow, such as {wrong[:3]}")
    return problems


def _comparable(store: Path) -> dict[tuple[str, int], float | None]:
    """Return the points that faults do not change."""
    return {
        key: value
        for key, value in points_of(store).items()
        if not key[0].startswith("time/") and key[0].rpartition("/")[2] not in _OF_FAULTS
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=1000, help="of each run")
    parser.add_argument("--every", type=int, default=10, help="iterations from fault to fault")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=KINDS,
        metavar="KIND",
        help=f"of {', '.join(KINDS)}",
    )
    parser.add_argument("--folder", type=Path, help="kept; default a new one, removed if it passes")
    arguments, overrides = parser.parse_known_args()
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="soak_faults_"))).absolute()
    whole, disturbed = folder / "whole", folder / "disturbed"
    for one in (folder, whole, disturbed):
        one.mkdir(parents=True, exist_ok=True)
    with services(folder) as (player, environments):

        def settings(place: Path) -> tuple[str, ...]:
            return (
                *SETTINGS,
                f"env.kwargs.urls=[{environments.url}]",
                f"rollout.engine.urls=[{player.url}]",
                f"paths.root={place}",
                f"paths.run_dir={place / 'run'}",
                f"trainer.max_epochs={arguments.iterations}",
                "trainer.devices=2",
                "trainer.strategy=ddp",
                "trainer.check_val_every_n_epoch=20",
                "callbacks.checkpoint.every_n_epochs=5",
                "+callbacks.recorder._target_=soak.soak_record.Recorder",
                f"+callbacks.recorder.folder={place}",
                *overrides,
            )

        start = time.monotonic()
        undisturbed(whole, settings(whole))
        print(
            f"{arguments.iterations} iterations without faults in {time.monotonic() - start:.0f} s"
        )
        run = Disturbed(
            disturbed,
            settings(disturbed),
            player=player,
            environments=environments,
            seed=arguments.seed,
            every=arguments.every,
            kinds=arguments.kinds,
        )
        start = time.monotonic()
        run.run(iterations=arguments.iterations)
    print(f"with {run.counts.total()} faults and {run.starts} starts in {time.monotonic() - start:.0f} s: "
          f"{dict(run.counts)}; ended by {dict(run.endings)}")  # fmt: skip
    problems = differences(whole, disturbed) + unsent(disturbed)
    end(problems, folder, keep=arguments.folder is not None)
    print("passed: trajectories, weights and points are those of the undisturbed run")


if __name__ == "__main__":
    main()
