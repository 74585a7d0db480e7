"""Checkpoints of a run: every few iterations, the best validation, and when a signal ends the run."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal, TypedDict, Unpack

import lightning.pytorch as pl
from annotated_types import Ge
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import CountOrZero, Positive, declared
from ragen_pl.base.distributed import StopRequestedError, any_over_ranks, gather_over_ranks
from ragen_pl.base.instances import instances
from ragen_pl.base.stop_signals import Stopped, ending, leave_terminal, stopping_signals
from ragen_pl.callbacks.access import agent_of
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.loops.rollout_update import is_last_iteration, log_step, rollout_loop

log = logging.getLogger(__name__)
# the part of the grace period in which an optimizer step under way may be finished
_FOR_STEP = 0.5


class SignalStop(Stopped, SIGTERMException):
    """A signal has ended the run, after its checkpoint."""


class StopSignals:
    """Signal handlers that leave it to the Trainer's callbacks when a run ends.

    The first SIGTERM, SIGUSR1, SIGHUP or Ctrl-C is noted in `received`. A second one ends the run at once, and so does
    the end of the grace period. SIGUSR1 is what job queues send some time before a job's end, SIGHUP a terminal that
    is closed. When the run is ending, further ones change nothing.

    Args:
        grace_seconds: Seconds that the run may take to reach a safe point.
    """

    def __init__(self, *, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._has_stopped = False
        self._trainer: pl.Trainer | None = None

    def install(self, trainer: pl.Trainer) -> None:
        """Replace Lightning's handlers. The Trainer restores the process's own ones at its end."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._trainer = trainer
        for number in stopping_signals():
            signal.signal(number, self._receive)
        signal.signal(signal.SIGALRM, self._end_now)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        assert self._trainer is not None
        if number == signal.SIGHUP:
            leave_terminal()
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), time.monotonic()
            self._forward(number)
            signal.setitimer(signal.ITIMER_REAL, self.grace_seconds)
        elif self._trainer.is_global_zero and not self._has_stopped:
            # other ranks get each signal twice: from the outside and from rank 0
            self._end_now(number, frame)

    @property
    def seconds_left(self) -> float:
        """Seconds until the end of the grace period."""
        waited = 0.0 if self.received is None else time.monotonic() - self._received_at
        return self.grace_seconds - waited

    def _forward(self, number: int) -> None:
        """Send a signal to the processes that this one has launched."""
        assert self._trainer is not None
        launcher = self._trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signal.Signals(number))

    def _end_now(self, number: int, frame: FrameType | None) -> None:
        self._forward(signal.SIGKILL)
        self.stop()

    def stop(self, received: signal.Signals | None = None) -> None:
        """Raise the exception that ends a Trainer after a signal, of this rank or another one."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._has_stopped = True
        ending()
        received = received or self.received or signal.SIGTERM
        if received is signal.SIGINT:
            raise KeyboardInterrupt
        raise SignalStop(received.name)


class CheckpointSettings(TypedDict, total=False):
    """Keyword arguments of Lightning's ModelCheckpoint.

    Attributes:
        dirpath: Folder of the checkpoints; the run's by default.
        filename: Name of a checkpoint, with fields such as `{epoch:04d}`.
        monitor: Metric by which the best are kept; null keeps the latest.
        mode: Whether low or high values of `monitor` are better.
        auto_insert_metric_name: Whether names of metrics are written before their values in the filename.
        every_n_epochs: Iterations between two checkpoints; 0 for none.
        every_n_train_steps: Optimizer steps between two checkpoints; 0 for none.
        save_last: Whether `last.ckpt` is kept.
        save_top_k: Number of checkpoints that are kept besides `last.ckpt`; -1 for all.
        save_on_train_epoch_end: Whether checkpoints are saved after the update, and not after the validation.
        save_weights_only: Whether states of optimizers and loops are left out.
        enable_version_counter: Whether a checkpoint of the same name gets a number instead of replacing it.
    """

    dirpath: str | None
    filename: str | None
    monitor: str | None
    mode: Literal["min", "max"]
    auto_insert_metric_name: bool
    every_n_epochs: CountOrZero | None
    every_n_train_steps: CountOrZero | None
    save_last: bool | Literal["link"] | None
    save_top_k: Annotated[int, Ge(-1)]
    save_on_train_epoch_end: bool | None
    save_weights_only: bool
    enable_version_counter: bool


class RunCheckpoint(RolloutCallback, ModelCheckpoint):
    """Save every few iterations, at the end of the run, and when a signal ends it: SIGTERM, SIGUSR1, SIGHUP or Ctrl-C.

    `last.ckpt` is overwritten, also by a run that was resumed from another checkpoint.

    After a signal the run saves and ends at the next safe point: after a minibatch, between turns of a
    rollout, between the batches of a validation, or at the end of an iteration. Ranks that share a rollout
    engine stop after a rollout or a validation instead of inside it. An optimizer step under way is finished if
    half of the grace period is enough for it. A checkpoint written in the rollout phase or in a validation holds
    the state before it. All ranks agree on the point.

    Args:
        grace_seconds: Seconds after a signal to reach a safe point, else the run ends without saving.
        settings: Keyword arguments of Lightning's ModelCheckpoint.
    """

    needs_trust = ()

    @checked
    def __init__(
        self, *, grace_seconds: Positive = 25.0, **settings: Unpack[CheckpointSettings]
    ) -> None:
        defaults = {"save_last": True, "enable_version_counter": False}
        super().__init__(**(defaults | settings))  # type: ignore[arg-type]
        self.signals = StopSignals(grace_seconds=grace_seconds)
        self._safe_at: float | None = None
        self._minibatch_at = self._minibatch_s = 0.0
        self._has_warned = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the signal handlers."""
        super().on_train_start(trainer, pl_module)
        self.signals.install(trainer)

    def on_rollout_progress(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, done: int, total: int
    ) -> None:
        """Stop the rollouts of all ranks, between two turns, if this one has received a signal."""
        self._note_safe_point(trainer)
        alone = self._stop_requested_alone(trainer, pl_module)
        if alone or (done == total and self._stop_requested(trainer)):
            raise StopRequestedError

    def on_rollout_stopped(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save and end the run."""
        self._save_and_stop(trainer)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: object
    ) -> None:
        """Take the time of the minibatch."""
        super().on_train_batch_start(trainer, pl_module, *arguments)  # type: ignore[arg-type]
        self._minibatch_at = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: object
    ) -> None:
        """Save if due, and stop if a signal was received."""
        self._minibatch_s = time.monotonic() - self._minibatch_at
        super().on_train_batch_end(trainer, pl_module, *arguments)  # type: ignore[arg-type]
        # only the rollout/update loop saves the gradients of an unfinished optimizer step
        if rollout_loop(trainer) is not None or not trainer.fit_loop._should_accumulate():
            self._stop_if_requested(trainer, in_step=True)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop before a validation if a signal was received."""
        if _follows_update(trainer):
            self._stop_if_requested(trainer)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: object
    ) -> None:
        """Stop between the batches of a validation if a signal was received."""
        # a rank without a signal asks the others at its last batch
        self._note_safe_point(trainer)
        # an average of the weights is in their place during a validation
        averages = instances(trainer.callbacks, WeightAveraging)  # type: ignore[attr-defined]
        alone = not averages and self._stop_requested_alone(trainer, pl_module)
        if _follows_update(trainer) and alone:
            self._stop_if_requested(trainer)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop after the batches of a validation, before its metrics, if a signal was received."""
        if _follows_update(trainer):
            self._stop_if_requested(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if due, in the last iteration, and if a signal was received."""
        super().on_train_epoch_end(trainer, pl_module)
        saved = self._last_global_step_saved == trainer.global_step
        if (
            self.save_last
            and not saved
            and (is_last_iteration(trainer) or self._is_due_without_others(trainer))
        ):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        self._stop_if_requested(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the signals back, and stop if one was received since the last iteration."""
        super().on_train_end(trainer, pl_module)
        trainer._signal_connector.teardown()
        self._stop_if_requested(trainer)

    def _is_due_without_others(self, trainer: pl.Trainer) -> bool:
        """Return whether `last.ckpt` is due where no other file is kept: Lightning writes it together with one."""
        every = self._every_n_epochs if self._should_save_on_train_epoch_end(trainer) else 0
        return self.save_top_k == 0 and every > 0 and (trainer.current_epoch + 1) % every == 0

    def _stop_requested(self, trainer: pl.Trainer) -> bool:
        # Lightning's own handler is in place until training starts
        return self.signals.received is not None or trainer.received_sigterm

    def _stop_requested_alone(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> bool:
        """Return whether this rank may ask the others to stop while they play: not if they play with it."""
        agent = agent_of(pl_module)
        return self._stop_requested(trainer) and not (agent and agent.engine_is_shared)

    def _stop_if_requested(self, trainer: pl.Trainer, *, in_step: bool = False) -> None:
        self._note_safe_point(trainer)
        if any_over_ranks(self._stop_requested(trainer)) and not self._finishes_step(trainer):
            if in_step:
                log_step(trainer)
            self._save_and_stop(trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """End the grace period: without the handler that the Trainer is about to remove, its end kills the process."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        super().on_exception(trainer, pl_module, exception)

    def _finishes_step(self, trainer: pl.Trainer) -> bool:
        """Return whether the optimizer step under way ends soon enough to be waited for. All ranks must call it."""
        loop = rollout_loop(trainer)
        left = 0 if loop is None else loop.minibatches_to_step
        if not left:
            return False
        spent = self.signals.grace_seconds - self.signals.seconds_left
        late = spent + left * self._minibatch_s > _FOR_STEP * self.signals.grace_seconds
        return not any_over_ranks(late)

    def _save_and_stop(self, trainer: pl.Trainer) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        candidates = self._monitor_candidates(trainer)
        if self.save_last:
            self._save_last_checkpoint(trainer, candidates)
        else:
            self._save_topk_checkpoint(trainer, candidates)
        received = [name for name in gather_over_ranks(self.signals.received) if name is not None]
        self.signals.stop(received[0] if received else None)

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        start = time.monotonic()
        super()._save_checkpoint(trainer, filepath)
        if self._safe_at is not None:
            # a signal's time limit does not count it
            self._safe_at += time.monotonic() - start

    def _note_safe_point(self, trainer: pl.Trainer) -> None:
        """Warn if the way from the last point at which a signal could end the run was longer than the grace period."""
        now = time.monotonic()
        gap = 0.0 if self._safe_at is None else now - self._safe_at
        self._safe_at = now
        if gap > self.signals.grace_seconds and not self._has_warned and trainer.is_global_zero:
            self._has_warned = True
            log.warning(
                f"callbacks.checkpoint.grace_seconds={self.signals.grace_seconds:g}: {gap:.0f} s passed between two "
                "points at which a signal can end the run, so SIGTERM may lose what was done since the last "
                f"checkpoint; set about {2 * gap:.0f}, and let the job queue wait longer than that"
            )


class BestCheckpoint(ModelCheckpoint):
    """Keep the weights of the best validation as `best.ckpt`: of equals by `val/return`, else the earliest.

    The validation before the first iteration competes, and so does that of the last weights. In a run that goes on from
    another run's checkpoint the weights that it begins with compete, if they were validated. The file is written at the
    end of the iteration, after its samples were dropped. It is therefore small and can be resumed from.

    Where no validation has a success, as in an environment that sets none, the return alone decides.

    In a mixture `val/success` is that of the environment with the lowest; `of_environment` keeps the best weights for
    one environment.

    Args:
        monitor: Metric to maximize.
        filename: Name of the file, without its ending.
    """

    needs_trust = ()

    @checked
    def __init__(
        self,
        *,
        monitor: Annotated[str, declared("METRICS", prefix="val/")] = "val/success",
        filename: str = "best",
    ) -> None:
        super().__init__(
            filename=filename,
            monitor=monitor,
            mode="max",
            save_top_k=1,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self.best_return: float | None = None
        # whether the run goes on in the folder of its checkpoint, with the best checkpoint in it
        self._goes_on_there = False

    @classmethod
    def of_environment(cls, name: str) -> BestCheckpoint:
        """Return a callback that keeps the best weights for an environment of a mixture as `best_<name>.ckpt`."""
        return cls(monitor=f"val/{name}/success", filename=f"best_{name}")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the weights that a run goes on with in another folder, if they were validated."""
        super().on_train_start(trainer, pl_module)
        if self.best_model_score is None and self._is_measured(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the weights before the first iteration."""
        if self._is_measured(trainer) and not _follows_update(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the weights if they are the best so far."""
        if self._is_measured(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the last weights if their validation came after the end of the iteration and is the best."""
        super().on_train_end(trainer, pl_module)
        self.on_train_epoch_end(trainer, pl_module)

    def _is_measured(self, trainer: pl.Trainer) -> bool:
        """Return whether the metrics of a validation are those of the present weights."""
        fits = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        loop = rollout_loop(trainer) if fits else None
        measured = loop is not None and loop.is_measured
        return measured and self.monitor in trainer.callback_metrics

    def check_monitor_top_k(self, trainer: pl.Trainer, current: Tensor | None = None) -> bool:
        """Return whether the present weights are better than those of `best.ckpt`."""
        if super().check_monitor_top_k(trainer, current):
            return True
        equal = current is not None and bool(current == self.best_model_score)
        present = self._return_of(trainer)
        if not equal or present is None or self.best_return is None:
            return False
        return present > self.best_return

    def _update_best_and_save(
        self, current: Tensor, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        # the file holds it
        self.best_return = self._return_of(trainer)
        super()._update_best_and_save(current, trainer, monitor_candidates)

    def _return_of(self, trainer: pl.Trainer) -> float | None:
        """Return the mean return of the last validation, None where it has none."""
        assert self.monitor is not None
        value = trainer.callback_metrics.get(f"{self.monitor.rpartition('/')[0]}/return")
        return None if value is None else float(value)

    def state_dict(self) -> dict[str, Any]:
        """Return Lightning's state, and the return of the best validation."""
        return super().state_dict() | {"best_return": self.best_return}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Note whether the checkpoint is beside the best one: its folder may have been moved since it was written."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        folder, file = Path(str(self.dirpath)), Path(str(trainer.ckpt_path))
        own = (
            file.resolve().parent == folder.resolve()
            and (folder / f"{self.filename}.ckpt").exists()
        )
        # ranks that saw it differently would not save together
        self._goes_on_there = trainer.strategy.broadcast(own)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`, in the folder that it was written in only: another one has another best checkpoint."""
        if self._goes_on_there:
            state_dict = _moved(state_dict, to=str(self.dirpath))
        if self.dirpath == state_dict.get("dirpath"):
            super().load_state_dict(state_dict)
            self.best_return = state_dict.get("best_return")


def _moved(state: Mapping[str, Any], *, to: str) -> dict[str, Any]:
    """Return the state of a ModelCheckpoint with the paths of its files in another folder."""

    def place(path: str) -> str:
        return str(Path(to) / Path(path).name) if path else path

    paths = ("best_model_path", "kth_best_model_path", "last_model_path")
    return {
        **state,
        "dirpath": to,
        **{name: place(state[name]) for name in paths},
        "best_k_models": {place(path): score for path, score in state["best_k_models"].items()},
    }


def _follows_update(trainer: pl.Trainer) -> bool:
    """Return whether a validation measures an update of this fit.

    A run that stops in the validation of the untrained policy would not repeat it when it is resumed.
    """
    return trainer.state.fn == TrainerFn.FITTING and trainer.global_step > 0
