"""Weights & Biases and TensorBoard: one run however often it is resumed, one point for each step, the plots."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ragen_pl.config import ConfigError
from ragen_pl.tracking import more_loggers
from ragen_pl.tracking.more_loggers import RunTensorBoardLogger, RunWandbLogger

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "frozenlake" / "first"


def log_some(logger, run: Path, *, steps: range) -> None:
    for step in steps:
        logger.log_metrics({"update/loss": step / 2, "epoch": 9.0}, step)
    logger.log_metrics({"val/success": math.nan}, steps[-1])
    picture = run / "plots" / "success.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(picture)
    logger.log_files(picture, place="plots")
    # of no kind that it shows
    logger.log_files(picture.parent, place="plots")


def kept(run: Path) -> list[tuple[int, dict[str, float | str]]]:
    """Return the run's own copy of its metrics."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    points = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    return [(point["step"], point["metrics"]) for point in points if "step" in point]


def test_a_resumed_run_continues_its_tensorboard_files(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = RunTensorBoardLogger(run_dir=str(run), settings={"seed": 3})
    log_some(first, run, steps=range(3))
    resumed = RunTensorBoardLogger(run_dir=str(run), settings={"seed": 3})
    # the steps since the checkpoint are repeated
    log_some(resumed, run, steps=range(2, 5))
    # a later one repeats no other steps
    again = RunTensorBoardLogger(run_dir=str(run), settings={"seed": 3})
    again.keep(4)
    log_some(again, run, steps=range(3, 5))
    for logger in (first, resumed, again):
        logger.finalize("success")
        logger.close()
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    points = [(point.step, point.value) for point in events.Scalars("update/loss")]
    assert points == [(step, step / 2) for step in range(5)]
    assert "epoch" not in events.Tags()["scalars"]
    image = events.Images("plots/success")[-1]
    assert (image.step, image.width, image.height) == (4, 6, 4)
    (text, *_) = events.Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0] == b"    seed: 3\n"
    assert (0, {"update/loss": 0.0}) in kept(run) and (4, {"val/success": "nan"}) in kept(run)


@pytest.fixture
def finished() -> Iterator[list[RunWandbLogger]]:
    """Collect loggers that are closed at the end."""
    loggers: list[RunWandbLogger] = []
    yield loggers
    for logger in loggers:
        logger.close()


@pytest.mark.slow
def test_a_resumed_run_is_one_run_of_weights_and_biases(run, finished, caplog):
    pytest.importorskip("wandb")
    first = RunWandbLogger(run_dir=str(run), settings={"seed": 3}, offline=True)
    finished.append(first)
    log_some(first, run, steps=range(3))
    summary = dict(first.experiment.summary)
    assert (summary["update/loss"], summary["trainer/global_step"]) == (1.0, 2)
    assert "plots/success" in summary and "epoch" not in summary
    assert first.experiment.config["seed"] == 3
    identity = first.experiment.id
    first.close()
    resumed = RunWandbLogger(run_dir=str(run), settings={"seed": 3}, offline=True)
    finished.append(resumed)
    assert resumed.experiment.id == identity
    log_some(resumed, run, steps=range(2, 5))
    steps = [step for step, metrics in kept(run) if "update/loss" in metrics]
    assert steps == [0, 1, 2, 3, 4]

    def fail(*arguments: object) -> None:
        raise RuntimeError("the service has ended")

    resumed.experiment.log = fail  # as a service that was killed
    for step in (5, 6):
        resumed.log_metrics({"update/loss": 0.5}, step)
    assert caplog.text.count("the service has ended; the run goes on") == 1
    assert kept(run)[-1] == (6, {"update/loss": 0.5})


def test_a_logger_that_cannot_work_is_refused(monkeypatch, run):
    for kind, name in ((RunTensorBoardLogger, "tensorboard"), (RunWandbLogger, "wandb")):
        monkeypatch.setattr(more_loggers, "find_spec", lambda package: None)
        with pytest.raises(ConfigError, match=rf"pip install 'ragen_pl\[{name}\]'"):
            kind.check_settings({}, root=".")
    monkeypatch.undo()
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(run))
    monkeypatch.setenv("NETRC", str(run / "none"))
    with pytest.raises(
        ConfigError, match=r"no API key; run wandb login, or set logger.offline=true"
    ):
        RunWandbLogger.check_settings({"offline": False}, root=".")
    RunWandbLogger.check_settings({"offline": True}, root=".")
