"""The rollout/update loop: one Trainer epoch is one iteration.

A rollout phase fills the DataModule's buffer. Lightning's own training-epoch loop then runs the update
phase over it. Checkpointing, validation, accumulation, clipping, loggers and strategies stay Lightning's.
Everything that touches Lightning's private API is in this file.

The DataModule implements `CollectsTrajectories`; the module offers `rollout_engine()` and
`prepare(batch)`. See `RolloutDataModule` and `AgentModule`, or write your own.

Checkpoints may be written in any hook. One written after the last minibatch of an iteration needs care:
Lightning would take the iteration for finished and skip its validation and epoch-end hooks, or start the
next one in the middle. Here the resumed run finishes the iteration first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BatchProgress, _ProcessedTracker
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ragen_pl.base.distributed import StopRequestedError, own_part, rank, with_part, world_size
from ragen_pl.base.instances import instances
from ragen_pl.base.seeding import derive_seed, seeded
from ragen_pl.checkpoints.rank_states import save_rank_states
from ragen_pl.loops.hooks import CollectsTrajectories, RolloutCallback

log = logging.getLogger(__name__)

TESTED_LIGHTNING = (2, 6)


class RolloutUpdateLoop(_FitLoop):
    """A fit loop whose epoch is a rollout phase followed by an update phase."""

    validate_first: bool
    _resumed: bool
    # resumed after the last minibatch: only the end of the iteration is left
    _finishing: bool
    # metrics of the validation of the present weights, None without one
    _measured: dict[str, torch.Tensor] | None
    # after the last minibatch that was trained on
    _loader_states: list[dict[str, Any]]
    # accumulated before a checkpoint inside an optimizer step
    _gradients: dict[str, torch.Tensor]
    # the run has ended before the iteration's last minibatch, and the hooks of its end have been called
    _is_cut: bool

    @classmethod
    def replacing(cls, old: _FitLoop, *, validate_first: bool) -> RolloutUpdateLoop:
        """Return a loop with the state of a Trainer's present one."""
        new = cls.__new__(cls)
        new.__dict__.update(old.__dict__)
        new.validate_first = validate_first
        new._resumed = new._finishing = False
        new._measured, new._loader_states, new._gradients, new._is_cut = None, [], {}, False
        return new

    @property
    def iteration(self) -> int:
        """Number of the present iteration, counted from 0."""
        return int(cast(_ProcessedTracker, self.epoch_progress.current).processed)

    @property
    def _collector(self) -> CollectsTrajectories:
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(datamodule, CollectsTrajectories):
            raise TypeError(
                f"the rollout/update loop found {type(datamodule).__name__} as the Trainer's DataModule; "
                "pass one with collect, has_buffer and drop_buffer, such as ragen_pl.data.datamodule.RolloutDataModule"
            )
        return datamodule

    @property
    def done(self) -> bool:
        """Whether the run has ended. A resumed run ends an iteration whose last step it has taken first."""
        return super().done and not (
            self._update_begun and not self._is_cut and self._collector.has_buffer(self.iteration)
        )

    def _iteration_based_training(self) -> bool:
        """Return False: epochs are resumed as such where the number of steps limits a run too."""
        return False

    def run(self) -> None:
        """Run the iterations. A run that was ended inside one goes on with its next minibatch."""
        if self._is_cut and not self._loaded_from_state_dict:
            self.load_state_dict(self.state_dict())
        super().run()

    def setup_data(self) -> None:
        """Build the train loader if there is a buffer."""
        if self._collector.has_buffer(self.iteration):
            super().setup_data()

    @property
    def _should_reload_train_dl(self) -> bool:
        """Whether to build a new loader: once in each iteration, whatever the Trainer's flag says."""
        return self._last_train_dl_reload_epoch != self.trainer.current_epoch

    def reset(self) -> None:
        """Prepare the run and correct the progress of a checkpoint from around the update phase."""
        self._resumed = self._loaded_from_state_dict
        resuming = self.restarting and self._collector.has_buffer(self.iteration)
        has_started = self._update_begun
        batches = self.epoch_loop.batch_progress
        if _untrained(batches):
            # it will be fetched again, and Lightning counts it as trained
            batches.is_last_batch = False
            if self.restarting and not self.epoch_loop._should_accumulate():
                self.epoch_loop._batches_that_stepped -= 1
        is_last = batches.is_last_batch or _has_all_steps(self.trainer)
        self._finishing = resuming and has_started and is_last
        if resuming and not has_started:
            # written by an epoch-start hook: the update starts from there
            self.epoch_progress.total.ready -= self.epoch_progress.current.ready - self.iteration
            self.epoch_progress.current.ready = self.iteration
            _forget_restart(self)
        elif self._finishing:
            self._complete_last_batch()
            _forget_restart(self)
        super().reset()

    @property
    def _update_begun(self) -> bool:
        """Whether the epoch-start hooks of the present iteration have been run."""
        current = cast(_ProcessedTracker, self.epoch_progress.current)
        return int(cast(Any, current).started) > int(current.processed)

    def _complete_last_batch(self) -> None:
        progress = self.epoch_loop.batch_progress
        if progress.current.completed < cast(_ProcessedTracker, progress.current).processed:
            progress.increment_completed()
        self.epoch_loop._batches_that_stepped += 1

    def on_run_start(self) -> None:
        """Call the start hooks, and validate the untrained policy if `validate_first` is set."""
        # a checkpoint that was written after a validation has its metrics, and it is not repeated
        self.trainer._logger_connector._callback_metrics.update(self._measured or {})
        super().on_run_start()
        self._restore_gradients()
        if self.validate_first and not self._resumed and self.trainer.enable_validation:
            self._validate()

    def _warn_if_modules_in_eval_mode(self) -> None:
        """Do nothing: each phase sets the mode that it needs."""

    def on_advance_start(self) -> None:
        """Run the rollout phase, unless the trajectories came from a checkpoint."""
        if self._finishing:
            return
        self._is_cut = False
        datamodule, iteration = self._collector, self.iteration
        if not datamodule.has_buffer(iteration):
            self._combined_loader_states_to_load, self._loader_states = [], []
            self._rollout(datamodule, iteration)
            self.forget_validation()
        self.trainer.lightning_module.train()
        super().on_advance_start()

    def advance(self) -> None:
        """Run the update phase, or only the validation that is left of a resumed one, and validate the last weights."""
        due = False
        if not self._finishing:
            super().advance()
            # as large as the weights; the rollout and the validation need none
            if not self._inside_a_step():
                self.trainer.lightning_module.zero_grad()
        else:
            assert self._data_fetcher is not None
            due = self.epoch_loop._should_check_val_fx(self._data_fetcher)
        due = due or (is_last_iteration(self.trainer) and self.trainer.enable_validation)
        if due and not self.is_measured:
            with self._before_the_last_step_is_counted():
                self._validate()

    def on_advance_end(self) -> None:
        """Drop the buffer and end the iteration. A checkpoint of its end does not hold the buffer.

        An iteration that the run's limit of steps or of time cuts is not counted, and keeps the buffer: a longer run
        takes the minibatches that are left.

        Lightning logs an iteration's metrics after its checkpoints are written. A run that is stopped or killed between
        the two would go on after the iteration, whose metrics would be lost. Here they are logged before.
        """
        self._finishing = False
        self._is_cut = not self.epoch_loop._num_ready_batches_reached()
        trainer, connector = self.trainer, self.trainer._logger_connector
        connector.epoch_end_reached()
        if not self._is_cut:
            self._collector.drop_buffer()
            self.epoch_progress.increment_processed()
        call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=False)
        call._call_lightning_module_hook(trainer, "on_train_epoch_end")
        self._log_iteration()
        call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=True)
        if not self.restarting and self.epoch_loop._num_ready_batches_reached():
            self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        # metrics that callbacks of checkpoints have logged
        self._log_iteration()
        if not self._is_cut:
            self.epoch_progress.increment_completed()
        if trainer.received_sigterm:
            raise SIGTERMException

    def on_run_end(self) -> None:
        """Validate the last weights if the run was ended after its last validation, and call the hooks of the end.

        All of it comes before the Trainer moves the model to the host.
        """
        if self.trainer.enable_validation and not self.is_measured:
            if self.trainer.is_global_zero:
                log.info("validating the last weights")
            self._validate()
        super().on_run_end()
        for callback in self._rollout_callbacks:
            callback.on_last_weights(self.trainer, self.trainer.lightning_module)

    def _log_iteration(self) -> None:
        """Log the metrics of the iteration that have not been logged yet."""
        connector = self.trainer._logger_connector
        connector.on_epoch_end()
        with self._before_the_last_step_is_counted():
            connector.update_train_epoch_metrics()

    @contextmanager
    def _before_the_last_step_is_counted(self) -> Iterator[None]:
        """Show loggers and checkpoints the step of the last minibatch, as they see it inside of the update phase.

        It stays after an error, for the checkpoint that is written then.
        """
        self.epoch_loop._batches_that_stepped -= 1
        yield
        self.epoch_loop._batches_that_stepped += 1

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the loop's state: progress, loader positions, accumulated gradients and metrics of a validation."""
        state = super().on_save_checkpoint()
        state["measured"], state["is_cut"] = self._measured, self._is_cut
        batches = self.epoch_loop.batch_progress
        if _untrained(batches):
            state["combined_loader"] = self._loader_states
        if self._inside_a_step():
            own = {
                name: own_part(parameter.grad)
                for name, parameter in self.trainer.lightning_module.named_parameters()
                if parameter.grad is not None
            }
            state["gradients"] = save_rank_states(own, name="gradients")
        return state

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Restore `on_save_checkpoint`'s state."""
        super().on_load_checkpoint(state_dict)
        # earlier versions kept none, and validate again
        self._measured, self._is_cut = state_dict.get("measured"), state_dict.get("is_cut", False)
        self._loader_states = self._combined_loader_states_to_load
        gradients = state_dict.get("gradients", [])
        self._gradients = gradients[rank()] if len(gradients) == world_size() else {}

    @property
    def is_measured(self) -> bool:
        """Whether the Trainer's metrics of a validation are those of the present weights."""
        return self._measured is not None

    def note_validation(self) -> None:
        """Store the metrics of the validation that has ended. One that was interrupted starts again."""
        self._measured = dict(self.trainer._logger_connector.metrics["callback"])

    def forget_validation(self) -> None:
        """Note that the weights are no longer those that were validated."""
        self._measured = None

    def note_trained(self) -> None:
        """Store the loader's position. It is one ahead while the next minibatch is trained on."""
        if self._combined_loader is not None:
            self._loader_states = self._combined_loader._state_dicts()

    @property
    def minibatches_to_step(self) -> int:
        """Number of minibatches that are left of an optimizer step under way; 0 between two steps."""
        if not self._inside_a_step():
            return 0
        trained = cast(_ProcessedTracker, self.epoch_loop.batch_progress.current).processed
        return int(-trained % self.trainer.accumulate_grad_batches)

    def _inside_a_step(self) -> bool:
        """Return whether there are accumulated gradients that no optimizer step has used."""
        batches = self.epoch_loop.batch_progress
        done = batches.is_last_batch and not _untrained(batches)
        trained = cast(_ProcessedTracker, batches.current).processed
        return trained % self.trainer.accumulate_grad_batches != 0 and not done

    def _restore_gradients(self) -> None:
        for name, parameter in self.trainer.lightning_module.named_parameters():
            if name in self._gradients:
                parameter.grad = with_part(self._gradients[name], parameter)
        self._gradients = {}

    def _rollout(self, datamodule: CollectsTrajectories, iteration: int) -> None:
        trainer, module = self.trainer, self.trainer.lightning_module
        module.eval()
        for callback in self._rollout_callbacks:
            callback.on_rollout_start(trainer, module)
        try:
            with (
                trainer.profiler.profile("rollout"),  # type: ignore[attr-defined]
                torch.no_grad(),
                seeded(datamodule.seed, "rollout", iteration, rank()),
            ):
                trajectories = datamodule.collect(iteration, module, progress=self._progress)
        except StopRequestedError:
            for callback in self._rollout_callbacks:
                callback.on_rollout_stopped(trainer, module)
            raise
        for callback in self._rollout_callbacks:
            callback.on_rollout_end(trainer, module, trajectories)

    @property
    def _rollout_callbacks(self) -> list[RolloutCallback]:
        return instances(self.trainer.callbacks, RolloutCallback)  # type: ignore[attr-defined]

    def _progress(self, done: int, total: int) -> None:
        for callback in self._rollout_callbacks:
            callback.on_rollout_progress(self.trainer, self.trainer.lightning_module, done, total)
        # Lightning itself checks after minibatches only
        if self.trainer.received_sigterm:
            raise SIGTERMException

    def _validate(self) -> None:
        trainer = self.trainer
        first_loop_iter = trainer._logger_connector._first_loop_iter
        trainer.validating = True
        self.epoch_loop.val_loop.run()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = first_loop_iter


class RolloutUpdate(pl.Callback):
    """Install the rollout/update loop: `Trainer(callbacks=[RolloutUpdate()])`.

    Args:
        validate_first: Play the validation sets before the first iteration too.
    """

    def __init__(self, *, validate_first: bool = True) -> None:
        version = tuple(int(number) for number in lightning.__version__.split(".")[:2])
        if version != TESTED_LIGHTNING:
            raise RuntimeError(
                f"the rollout/update loop builds on lightning {'.'.join(map(str, TESTED_LIGHTNING))} and found "
                f"{lightning.__version__}; pip install 'lightning>=2.6,<2.7'"
            )
        self.validate_first = validate_first

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace the Trainer's fit loop once, and check its DataModule."""
        if stage != "fit":
            return
        if (loop := rollout_loop(trainer)) is None:
            loop = trainer.fit_loop = RolloutUpdateLoop.replacing(
                trainer.fit_loop, validate_first=self.validate_first
            )
        _ = loop._collector

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Seed the step from counters. Dropout is then the same after a resume."""
        loop = cast(RolloutUpdateLoop, trainer.fit_loop)
        loop.forget_validation()
        seed = derive_seed(loop._collector.seed, "update", trainer.current_epoch, rank(), batch_idx)
        torch.manual_seed(seed)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: object
    ) -> None:
        """Store the loader's position."""
        cast(RolloutUpdateLoop, trainer.fit_loop).note_trained()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note that the validation has ended."""
        if (loop := rollout_loop(trainer)) is not None:
            loop.note_validation()


def rollout_loop(trainer: pl.Trainer) -> RolloutUpdateLoop | None:
    """Return the Trainer's loop if it is one of rollouts and updates; None for another, such as the warm start's."""
    return trainer.fit_loop if isinstance(trainer.fit_loop, RolloutUpdateLoop) else None


def is_last_iteration(trainer: pl.Trainer) -> bool:
    """Return whether the run ends with the present iteration, as far as is known before its end."""
    limit = trainer.max_epochs
    by_epochs = limit not in (None, -1) and trainer.current_epoch + 1 >= limit
    return bool(trainer.should_stop or _has_all_steps(trainer) or by_epochs)


def _has_all_steps(trainer: pl.Trainer) -> bool:
    """Return whether a run that its number of optimizer steps limits has taken them."""
    return trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps


def log_step(trainer: pl.Trainer) -> None:
    """Log the metrics of an optimizer step before a stop in its last hook: Lightning logs them after all hooks."""
    trainer._logger_connector.update_train_step_metrics()


def _untrained(batches: _BatchProgress) -> bool:
    """Return whether a minibatch has been fetched whose training has not ended."""
    current = cast(_ProcessedTracker, batches.current)
    return bool(current.ready > current.processed)


def _forget_restart(loop: _Loop) -> None:
    """Clear the restart flags of a loop and its children."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    loop.reset_restart_stage()
    for child in instances(vars(loop).values(), _Loop):
        _forget_restart(child)
