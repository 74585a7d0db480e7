"""Where a signal ends a run: after an optimizer step that is nearly done, or in its midst."""

from __future__ import annotations

import csv
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger

from ragen_pl.callbacks.checkpoint import RunCheckpoint, SignalStop
from ragen_pl.loops.hooks import RolloutCallback


class SignalIn(RolloutCallback):
    """Note a signal in the first minibatch of an optimizer step, or in a rollout."""

    def __init__(self, checkpoint: RunCheckpoint, *, iteration: int | None = None) -> None:
        self.checkpoint, self.iteration = checkpoint, iteration

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, index: int
    ) -> None:
        # the time of a minibatch is known from the second one on
        if self.iteration is None and index == 2:
            self.checkpoint.signals.received = signal.SIGUSR1

    def on_rollout_progress(
        self, trainer: pl.Trainer, module: pl.LightningModule, done: int, total: int
    ) -> None:
        if trainer.current_epoch == self.iteration:
            self.checkpoint.signals.received = signal.SIGTERM


def stopped(setup, folder: Path, *, grace_seconds: float, iteration: int | None = None) -> dict:
    """Return the checkpoint of a run that a signal ends, of two minibatches in each optimizer step."""
    checkpoint = RunCheckpoint(dirpath=str(folder), grace_seconds=grace_seconds)
    with pytest.raises(SignalStop) as raised:
        # the signal comes before the callback looks for it
        setup.fit(SignalIn(checkpoint, iteration=iteration), checkpoint, enable_checkpointing=True)
    assert raised.value.name == ("SIGUSR1" if iteration is None else "SIGTERM")
    return torch.load(folder / "last.ckpt", weights_only=True)


def test_an_optimizer_step_under_way_is_finished_if_the_grace_period_allows(setup_of, tmp_path):
    setup = setup_of(trainer={"accumulate_grad_batches": 2})
    finished = stopped(setup, tmp_path / "a", grace_seconds=1e6)
    assert finished["global_step"] == 2
    assert "gradients" not in finished["loops"]["fit_loop"]["state_dict"]
    inside = stopped(setup, tmp_path / "b", grace_seconds=1e-6)
    assert inside["global_step"] == 1
    (gradients,) = inside["loops"]["fit_loop"]["state_dict"]["gradients"]
    assert gradients


def test_a_signal_in_a_rollout_leaves_the_state_before_it(setup_of, tmp_path):
    saved = stopped(setup_of(), tmp_path, grace_seconds=1e6, iteration=1)
    assert saved["RolloutDataModule"]["buffers"] == [None]
    assert saved["global_step"] == 4


class SignalInValidation(pl.Callback):
    """Note a signal in the first of two batches of the validation after the second iteration."""

    def __init__(self, checkpoint: RunCheckpoint) -> None:
        self.checkpoint = checkpoint

    def on_validation_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *arguments: object
    ) -> None:
        if trainer.current_epoch == 1:
            self.checkpoint.signals.received = signal.SIGTERM


@pytest.mark.filterwarnings("ignore:You.re using the WeightAveraging")
def test_a_run_that_averages_weights_goes_on_exactly_after_a_stop_in_a_validation(
    setup_of, tmp_path
):
    setup = setup_of()
    whole, _, _ = setup.fit(EMAWeightAveraging(decay=0.5))
    checkpoint = RunCheckpoint(dirpath=str(tmp_path), grace_seconds=1e6)
    stops, averages = SignalInValidation(checkpoint), EMAWeightAveraging(decay=0.5)
    with pytest.raises(SignalStop):
        setup.fit(stops, averages, checkpoint, enable_checkpointing=True)
    file = str(tmp_path / "last.ckpt")
    averages, again = EMAWeightAveraging(decay=0.5), RunCheckpoint(dirpath=str(tmp_path))
    resumed, _, _ = setup.fit(averages, again, ckpt_path=file, enable_checkpointing=True)
    weights = resumed.state_dict()
    assert all(value.equal(weights[name]) for name, value in whole.state_dict().items())


class SignalAtEnd(pl.Callback):
    """Note a signal at the end of an iteration, before checkpoints are written."""

    def __init__(self, checkpoint: RunCheckpoint, *, iteration: int) -> None:
        self.checkpoint, self.iteration = checkpoint, iteration
        self.points: list[tuple[int | None, dict[str, float]]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.points = trainer.logger.points
        if trainer.current_epoch == self.iteration:
            self.checkpoint.signals.received = signal.SIGTERM


def test_a_stop_at_the_end_of_an_iteration_loses_none_of_its_points(setup_of, tmp_path):
    setup = setup_of()
    _, whole, _ = setup.fit()
    checkpoint = RunCheckpoint(dirpath=str(tmp_path), grace_seconds=1e6)
    stops = SignalAtEnd(checkpoint, iteration=1)
    with pytest.raises(SignalStop):
        setup.fit(stops, checkpoint, enable_checkpointing=True)
    again = RunCheckpoint(dirpath=str(tmp_path), grace_seconds=1e6)
    _, resumed, _ = setup.fit(
        again, ckpt_path=str(tmp_path / "last.ckpt"), enable_checkpointing=True
    )

    def logged(points):
        return sorted((step, name) for step, metrics in points for name in metrics)

    assert logged([*stops.points, *resumed]) == logged(whole)


def test_a_stop_inside_a_warm_start_logs_the_step_before_it(warm_start, tmp_path):
    module, demonstrations = warm_start(steps=8)
    checkpoint = RunCheckpoint(dirpath=str(tmp_path), grace_seconds=1e6)
    stops = SignalIn(checkpoint)
    trainer = pl.Trainer(
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        max_steps=8, max_epochs=-1, logger=CSVLogger(tmp_path), callbacks=[stops, checkpoint],
    )  # fmt: skip
    with pytest.raises(SignalStop):
        trainer.fit(module, datamodule=demonstrations)
    assert trainer.global_step == 3
    with Path(trainer.logger.experiment.metrics_file_path).open(newline="") as file:
        logged = [row["step"] for row in csv.DictReader(file) if row["warm_start/loss"]]
    assert logged == ["0", "1", "2"]
