"""Stop signals, and the agreement of last.ckpt and best.ckpt."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ragen_pl.callbacks.checkpoint import RunCheckpoint, StopSignals
from ragen_pl.callbacks.clock import RunClock
from ragen_pl.callbacks.random_state import RandomState
from ragen_pl.metrics.record import RecordReader
from ragen_pl.tracking.loggers import RecordLogger


@pytest.fixture
def restored_handlers():
    """Restore the process's signal handlers and timer after a test."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGALRM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Launcher:
    """Record the signals that are sent to other ranks."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def kill(self, number: int) -> None:
        self.sent.append(number)


def installed(*, rank: int = 0, grace_seconds: float = 60.0) -> tuple[StopSignals, Launcher]:
    signals, launcher = StopSignals(grace_seconds=grace_seconds), Launcher()
    strategy = SimpleNamespace(launcher=launcher)
    signals.install(SimpleNamespace(strategy=strategy, is_global_zero=rank == 0))
    return signals, launcher


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (signal.SIGTERM, SIGTERMException),
        (signal.SIGUSR1, SIGTERMException),
        (signal.SIGINT, KeyboardInterrupt),
    ],
)
def test_the_first_signal_is_noted_and_the_second_ends_at_once(restored_handlers, number, error):
    signals, launcher = installed()
    os.kill(os.getpid(), number)
    assert signals.received == number and launcher.sent == [number]
    with pytest.raises(error):
        os.kill(os.getpid(), number)
        time.sleep(60)
    assert launcher.sent == [number, signal.SIGKILL]


def test_other_ranks_may_receive_a_signal_twice(restored_handlers):
    signals, launcher = installed(rank=1)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == signal.SIGTERM and launcher.sent == [signal.SIGTERM]


def test_the_end_of_the_grace_period_ends_the_run(restored_handlers):
    _, launcher = installed(grace_seconds=0.05)
    with pytest.raises(SIGTERMException):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert launcher.sent == [signal.SIGTERM, signal.SIGKILL]


class Model(pl.LightningModule):
    """A weight that falls in each step, and a validation metric that falls with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.drawn: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.drawn.append(float(torch.rand(())))
        return self.layer(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val/success", 1.0 - 0.1 * self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of(
    folder: Path, *callbacks: pl.Callback, epochs: int, logger: object = False, **settings: object
) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=logger,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        **settings,
    )


DATA = torch.ones(3, 1)


class FailAfterSignal(pl.Callback):
    """Get SIGTERM, and fail before the next safe point."""

    def on_train_batch_start(self, *arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise KeyError("after a signal")


def test_no_alarm_is_left_to_a_run_that_fails_after_a_signal(restored_handlers, tmp_path):
    """Its handler is removed then, and the alarm would end the process before it has told its error."""
    run = RunCheckpoint(dirpath=str(tmp_path), grace_seconds=600.0)
    with pytest.raises(KeyError, match="after a signal"):
        trainer_of(tmp_path, run, FailAfterSignal(), epochs=1).fit(Model(), DATA, DATA)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


class AtEpochStart(pl.Callback):
    """Note the checkpoints that there are before each epoch."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        folder = Path(trainer.default_root_dir)
        self.found.append(sorted(file.name for file in folder.glob("*.ckpt")))


def test_last_checkpoint_is_kept_alone_if_no_other_is_wanted(tmp_path):
    run = RunCheckpoint(
        dirpath=str(tmp_path), every_n_epochs=2, save_top_k=0, save_on_train_epoch_end=True
    )
    noted = AtEpochStart()
    trainer_of(tmp_path, run, noted, epochs=4).fit(Model(), DATA, DATA)
    assert noted.found == [[], [], ["last.ckpt"], ["last.ckpt"]]


class Logging(Model):
    """A model that logs its loss, and is killed at a step."""

    def __init__(self, *, killed_at: int = -1) -> None:
        super().__init__()
        self.killed_at = killed_at

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if self.global_step == self.killed_at:
            raise RuntimeError("killed")
        loss = super().training_step(batch, index)
        self.log("warm_start/loss", loss)
        return loss


@pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*")
def test_a_run_that_goes_on_after_a_step_has_that_steps_point(tmp_path):
    def fit(model, **resume):
        trainer = trainer_of(
            tmp_path,
            RunClock(),
            RunCheckpoint(dirpath=str(tmp_path), filename="step", every_n_train_steps=2, save_last=False),
            epochs=2,
            logger=RecordLogger(run_dir=str(tmp_path)),
            log_every_n_steps=2,
            limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(model, DATA, DATA, **resume)

    with pytest.raises(RuntimeError, match="killed"):
        fit(Logging(killed_at=5))
    fit(Logging(), ckpt_path=tmp_path / "step.ckpt")
    assert [point.step for point in RecordReader(tmp_path).points()] == [1, 3, 5]


@pytest.mark.filterwarnings("ignore:.*dataloader is not resumable.*")
def test_random_state_is_continued_after_a_resume(tmp_path):
    torch.manual_seed(0)
    reference = Model()
    trainer_of(tmp_path, RandomState(), epochs=4).fit(reference, DATA, DATA)

    torch.manual_seed(0)
    trainer = trainer_of(tmp_path, RandomState(), epochs=2)
    trainer.fit(Model(), DATA, DATA)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(1)
    resumed = Model()
    trainer = trainer_of(tmp_path, RandomState(), epochs=4)
    trainer.fit(resumed, DATA, DATA, ckpt_path=tmp_path / "half.ckpt")
    assert resumed.drawn == reference.drawn[6:]
