"""The rollout/update loop: one Trainer epoch is one iteration.

A rollout phase fills the DataModule's buffer, then Lightning's own training-epoch loop runs the update
phase over it; checkpointing, validation, accumulation, clipping, loggers and strategies stay
Lightning's. Everything that touches Lightning's private surface is in this file.

The DataModule offers `seed`, `collect(iteration, module, *, progress)`, `has_buffer(iteration)` and
`drop_buffer()`; the module offers `rollout_engine()` and `prepare(batch)`: see `RolloutDataModule` and
`AgentModule`, or write your own.

Checkpoints may be written anywhere. One written after the last minibatch of an iteration needs care:
Lightning would take the iteration for finished and skip its validation and epoch-end hooks, or run the
next one as if in its middle. Here the resumed run finishes the iteration first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import lightning
import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BatchProgress, _ProcessedTracker
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ragen_pl.distributed import gather_over_ranks, rank, world_size
from ragen_pl.seeding import derive_seed, seeded
from ragen_pl.trajectory import Trajectory

TESTED_LIGHTNING = (2, 6)


@runtime_checkable
class CollectsTrajectories(Protocol):
    """What the loop asks of the DataModule."""

    seed: int

    def collect(
        self, iteration: int, module: pl.LightningModule, *, progress: Callable[[int, int], None]
    ) -> list[Trajectory]:
        """Roll out this rank's share of the iteration, fill the buffer and return the trajectories."""

    def has_buffer(self, iteration: int) -> bool:
        """Return whether the buffer holds this iteration's trajectories."""

    def drop_buffer(self) -> None:
        """Forget the buffer: the update is done with it."""


class RolloutUpdateLoop(_FitLoop):
    """A fit loop whose epoch is a rollout phase followed by an update phase."""

    validate_first: bool
    _resumed: bool
    _finishing: bool
    _validated: bool
    _loader_states: list[dict[str, Any]]
    _gradients: dict[str, torch.Tensor]

    @classmethod
    def replacing(cls, old: _FitLoop, *, validate_first: bool) -> RolloutUpdateLoop:
        """Take over a Trainer's loop with all that has been attached to it."""
        new = cls.__new__(cls)
        new.__dict__.update(old.__dict__)
        new.validate_first = validate_first
        new._resumed = False
        new._finishing = False  # resumed after the last minibatch: only the iteration's end is left
        new._validated = False  # this iteration's validation has been run
        new._loader_states = []  # after the last minibatch that was trained on
        new._gradients = {}  # of an optimizer step that a checkpoint cut in two
        return new

    @property
    def iteration(self) -> int:
        """The number of the iteration under way, counted from 0."""
        return int(cast(_ProcessedTracker, self.epoch_progress.current).processed)

    @property
    def _collector(self) -> CollectsTrajectories:
        datamodule = getattr(self.trainer, "datamodule", None)
        if not isinstance(datamodule, CollectsTrajectories):
            raise TypeError(
                f"the rollout/update loop found {type(datamodule).__name__} as the Trainer's DataModule; "
                "pass one with collect, has_buffer and drop_buffer, such as ragen_pl.data.datamodule.RolloutDataModule"
            )
        return datamodule

    def setup_data(self) -> None:
        """Build the train loader, once there is a buffer to build it from."""
        if self._collector.has_buffer(self.iteration):
            super().setup_data()

    @property
    def _should_reload_train_dl(self) -> bool:
        """Every iteration has a loader of its own, whatever the Trainer's flag says."""
        return self._last_train_dl_reload_epoch != self.trainer.current_epoch

    def reset(self) -> None:
        """Prepare the run, repairing what a checkpoint around the update phase left."""
        self._resumed = self._loaded_from_state_dict
        resuming = self.restarting and self._collector.has_buffer(self.iteration)
        has_started = self._update_begun
        batches = self.epoch_loop.batch_progress
        if _untrained(batches):  # fetched and not trained on: it will be fetched again
            batches.is_last_batch = False
            if self.restarting and not self.epoch_loop._should_accumulate():
                self.epoch_loop._batches_that_stepped -= 1  # Lightning counts it as trained
        self._finishing = resuming and has_started and batches.is_last_batch
        if (
            resuming and not has_started
        ):  # written by an epoch-start hook: start the update from there
            self.epoch_progress.total.ready -= self.epoch_progress.current.ready - self.iteration
            self.epoch_progress.current.ready = self.iteration
            _forget_restart(self)
        elif self._finishing:
            self._complete_last_batch()
            _forget_restart(self)
        super().reset()

    @property
    def _update_begun(self) -> bool:
        """Whether the epoch-start hooks of the iteration under way have been run."""
        current = cast(_ProcessedTracker, self.epoch_progress.current)
        return int(cast(Any, current).started) > int(current.processed)

    def _complete_last_batch(self) -> None:
        progress = self.epoch_loop.batch_progress
        if progress.current.completed < cast(_ProcessedTracker, progress.current).processed:
            progress.increment_completed()
        self.epoch_loop._batches_that_stepped += 1

    def on_run_start(self) -> None:
        """Call the start hooks, and validate the untrained policy where asked to."""
        super().on_run_start()
        self._restore_gradients()
        if self.validate_first and not self._resumed and self.trainer.enable_validation:
            self._validate()

    def _warn_if_modules_in_eval_mode(self) -> None:
        """Stay silent: each phase sets the mode that it needs."""

    def on_advance_start(self) -> None:
        """Run the rollout phase, unless a checkpoint brought its trajectories along."""
        if self._finishing:
            return
        datamodule, iteration = self._collector, self.iteration
        if not datamodule.has_buffer(iteration):
            self._combined_loader_states_to_load, self._loader_states = [], []
            self._rollout(datamodule, iteration)
            self._validated = False
        self.trainer.lightning_module.train()
        super().on_advance_start()

    def advance(self) -> None:
        """Run the update phase, or only the validation that an interrupted one still owes."""
        if not self._finishing:
            super().advance()
        elif not self._validated:
            assert self._data_fetcher is not None
            if self.epoch_loop._should_check_val_fx(self._data_fetcher):
                self._validate()

    def on_advance_end(self) -> None:
        """End the iteration. The buffer goes first, so that an epoch-end checkpoint does not hold it."""
        self._collector.drop_buffer()
        self._finishing = False
        super().on_advance_end()

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Add what resuming needs to know of the phase."""
        state = super().on_save_checkpoint()
        validation_ended = self.epoch_loop.val_loop.batch_progress.current.completed > 0
        state["validated"] = self._validated or (self.trainer.validating and validation_ended)
        batches = self.epoch_loop.batch_progress
        if _untrained(batches):
            state["combined_loader"] = self._loader_states
        if self._inside_a_step():
            state["gradients"] = gather_over_ranks(
                {
                    name: parameter.grad
                    for name, parameter in self.trainer.lightning_module.named_parameters()
                    if parameter.grad is not None
                }
            )
        return state

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Restore the phase."""
        super().on_load_checkpoint(state_dict)
        self._validated = state_dict["validated"]
        self._loader_states = self._combined_loader_states_to_load
        gradients = state_dict.get("gradients", [])
        self._gradients = gradients[rank()] if len(gradients) == world_size() else {}

    def note_trained(self) -> None:
        """Remember where the loader stands: it is ahead while the next minibatch is being trained on."""
        if self._combined_loader is not None:
            self._loader_states = self._combined_loader._state_dicts()

    def _inside_a_step(self) -> bool:
        """Whether gradients have been accumulated that no optimizer step has used yet."""
        batches = self.epoch_loop.batch_progress
        done = batches.is_last_batch and not _untrained(batches)
        trained = cast(_ProcessedTracker, batches.current).processed
        return trained % self.trainer.accumulate_grad_batches != 0 and not done

    def _restore_gradients(self) -> None:
        for name, parameter in self.trainer.lightning_module.named_parameters():
            if name in self._gradients:
                parameter.grad = self._gradients[name].to(parameter.device)
        self._gradients = {}

    def _rollout(self, datamodule: CollectsTrajectories, iteration: int) -> None:
        module = self.trainer.lightning_module
        module.eval()
        self._tell_callbacks("on_rollout_start")
        with (
            self.trainer.profiler.profile("rollout"),  # type: ignore[attr-defined]
            torch.no_grad(),
            seeded(datamodule.seed, "rollout", iteration, rank()),
        ):
            trajectories = datamodule.collect(iteration, module, progress=self._progress)
        self._tell_callbacks("on_rollout_end", trajectories)

    def _progress(self, done: int, total: int) -> None:
        if self.trainer.received_sigterm:  # Lightning itself looks after minibatches only
            raise SIGTERMException
        self._tell_callbacks("on_rollout_progress", done, total)

    def _tell_callbacks(self, hook: str, *arguments: object) -> None:
        """Call a hook that Lightning does not know on the callbacks that have it."""
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            function = getattr(callback, hook, None)
            if function is not None:
                function(self.trainer, self.trainer.lightning_module, *arguments)

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
        validate_first: run the validation validation sets before the first iteration too.
    """

    def __init__(self, *, validate_first: bool = True) -> None:
        found = tuple(int(part) for part in lightning.__version__.split(".")[:2])
        if found != TESTED_LIGHTNING:
            raise RuntimeError(
                f"the rollout/update loop builds on lightning {'.'.join(map(str, TESTED_LIGHTNING))} and found "
                f"{lightning.__version__}; pip install 'lightning>=2.6,<2.7'"
            )
        self.validate_first = validate_first

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Replace the Trainer's fit loop, once, and refuse a DataModule that can't collect trajectories."""
        if stage != "fit":
            return
        if not isinstance(trainer.fit_loop, RolloutUpdateLoop):
            trainer.fit_loop = RolloutUpdateLoop.replacing(
                trainer.fit_loop, validate_first=self.validate_first
            )
        _ = trainer.fit_loop._collector

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Seed the step from counters, so that dropout after a resume is what it would have been."""
        seed = getattr(trainer.datamodule, "seed", 0)  # type: ignore[attr-defined]
        torch.manual_seed(derive_seed(seed, "update", trainer.current_epoch, rank(), batch_idx))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *arguments: object
    ) -> None:
        """Keep the loader's position."""
        cast(RolloutUpdateLoop, trainer.fit_loop).note_trained()


def _untrained(batches: _BatchProgress) -> bool:
    """Whether a minibatch has been fetched whose training has not ended."""
    current = cast(_ProcessedTracker, batches.current)
    return bool(current.ready > current.processed)


def _forget_restart(loop: _Loop) -> None:
    """Make a loop and its children go on as if they had never been interrupted."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    loop.reset_restart_stage()
    for child in vars(loop).values():
        if isinstance(child, _Loop):
            _forget_restart(child)
