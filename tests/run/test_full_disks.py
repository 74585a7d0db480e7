"""A full disk is reported with the file that did not fit, whatever a run was writing."""

from __future__ import annotations

import errno
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.episodes.trajectories import make_trajectory, make_turn

from ragen_pl.base.records import ImageFiles, write_records
from ragen_pl.callbacks.trajectories import write_strips
from ragen_pl.checkpoints.folder import Run
from ragen_pl.checkpoints.starts import counted_start
from ragen_pl.config.ending import ending_of
from ragen_pl.metrics.record import MetricsRecord, Point
from ragen_pl.run.last_weights import write_metrics
from ragen_pl.tracking.loggers import RunCSVLogger
from ragen_pl.tracking.outbox import Outbox
from ragen_pl.trajectory import Observation
from ragen_pl.viewing.plots import draw_plots

IMAGE = np.zeros((8, 8, 3), dtype=np.uint8)
ROW = {"iteration": 1.0, "elapsed_s": 1.0, "rollout/success": 0.5, "rollout/episodes": 4.0}


def strips(folder: Path) -> None:
    turn = make_turn(observation=Observation(text="x", images=(IMAGE,)))
    write_strips([make_trajectory(turn)], folder)


def images(folder: Path) -> None:
    ImageFiles(folder).name(IMAGE)


def start(folder: Path) -> None:
    with counted_start(folder, begins="step 0", config="a", max_failures=None):
        pass


def csv(folder: Path) -> None:
    logger = RunCSVLogger(run_dir=str(folder))
    logger.track(Point(1, {"a": 1.0}))
    logger.save()


def outbox(folder: Path) -> None:
    class Away:
        def begin(self) -> bool:
            raise ConnectionError

        def send(self, call: dict[str, object]) -> None:
            raise AssertionError

    calls = Outbox(folder, Away())
    try:
        calls.put({"name": "log"})
    finally:
        calls.close(limit_s=0.0)


WRITERS: dict[str, Callable[[Path], object]] = {
    "0.png": strips,
    "images/*.png": images,
    "trajectories.jsonl": lambda folder: write_records([{"a": 1}], folder),
    "*.png": lambda folder: draw_plots([ROW], folder, title="a"),
    "metrics.json": lambda folder: write_metrics({"a": 1.0}, Run(folder)),
    "metrics.jsonl": lambda folder: MetricsRecord(folder).add({"a": 1.0}, 1),
    "starts.jsonl": start,
    "csv/metrics.csv": csv,
    "calls.jsonl": outbox,
}


@contextmanager
def full_disk() -> Iterator[None]:
    """Let this process write no byte into a file, which is like a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("name", WRITERS)
def test_the_line_names_the_file(tmp_path: Path, name: str) -> None:
    written, full = tmp_path / "written", tmp_path / "full"
    written.mkdir()
    full.mkdir()
    # nothing is wrong but the disk
    WRITERS[name](written)
    with pytest.raises(OSError) as raised, full_disk():
        WRITERS[name](full)
    assert raised.value.errno == errno.EFBIG
    ending = ending_of(raised.value)
    file = Path(ending.line.split(": File too large; ")[0])
    assert file.match(str(full / name)), ending.line
