"""The Trainer of a run: Lightning's, with the run's strategy, files of checkpoints, and end on all ranks together."""

from __future__ import annotations

import atexit
import functools
import inspect
import secrets
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from hydra.utils import get_object, instantiate
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ragen_pl.assembly.build import choose_accelerator
from ragen_pl.base.instances import instances
from ragen_pl.base.stop_signals import Stopped, ending, forward_to
from ragen_pl.callbacks.clock import RunClock
from ragen_pl.checkpoints.rank_states import rank_states_in
from ragen_pl.checkpoints.sharded_checkpoint import CheckpointFiles, folder_for, remove_shards
from ragen_pl.config.errors import config_errors
from ragen_pl.config.settings import keys_of
from ragen_pl.ranks import ranks
from ragen_pl.ranks.phase_limits import PhaseLimits
from ragen_pl.run.settings import LimitSettings

LIMITS = keys_of(LimitSettings)
"""Keys of the config's `trainer` that are no arguments of Lightning's Trainer."""

# object collectives, and tensors on the host, stay in the host's memory
_GPU_BACKEND = "cpu:gloo,cuda:nccl"
# validations of a run at least, and iterations between two of a run without an end
_VALIDATIONS, _INTERVAL = 4, 20


@functools.cache
def _end_process_group_at_exit() -> None:
    """End the process group with the process. Lightning does it for a bare NCCL only, and NCCL asks for it."""

    def end() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(end)


class RunTrainer(pl.Trainer):
    """Lightning's Trainer, whose checkpoints keep the states of each rank in a file of that rank."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._has_dropped_optimizer = False
        self._checkpoint_connector = _OwnCheckpoints(self)
        self._signal_connector = _OwnSignals(self)

    def fit(self, *arguments: Any, **settings: Any) -> None:
        """Train; ranks that Lightning launches for it are connected first."""
        launcher = self.strategy.launcher
        if (
            isinstance(launcher, _SubprocessScriptLauncher)
            and not launcher.cluster_environment.creates_processes_externally
            and self.world_size > 1
        ):
            ranks.serve_launched_ranks(self.world_size)
            forward_to(launcher.kill)
        super().fit(*arguments, **settings)

    def _teardown(self) -> None:
        """Drop gradients and the optimizer's state, which Lightning would copy to the host with the weights.

        The last checkpoint holds the state. Another `fit` builds its optimizer anew.
        """
        if self.strategy.optimizers:
            self.strategy.optimizers, self.strategy.lr_scheduler_configs = [], []
            self.lightning_module.zero_grad(set_to_none=True)
            self._has_dropped_optimizer = True
        super()._teardown()

    def save_checkpoint(
        self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Write a checkpoint and its folder. All ranks must call it.

        Raises:
            RuntimeError: The optimizer's state would be in it, which the end of `fit` has dropped.
        """
        if self._has_dropped_optimizer and not self.strategy.optimizers and not weights_only:
            raise RuntimeError(
                f"{filepath}: the end of fit has dropped the optimizer's state; save in a callback's on_train_end, or "
                "with weights_only=True"
            )
        file = Path(self.strategy.broadcast(str(filepath)))
        folder = folder_for(file, unique=self.strategy.broadcast(secrets.token_hex(4)))
        with rank_states_in(folder):
            super().save_checkpoint(file, weights_only, storage_options)
        if self.is_global_zero:
            remove_shards(file, keep=folder.name)


class _OwnCheckpoints(_CheckpointConnector):
    """Resumes from the run's checkpoint, never from a file that Lightning has written in SLURM's requeueing."""

    @property
    def _hpc_resume_path(self) -> None:
        return None


class _OwnSignals(_SignalConnector):
    """Leaves the signals to `ragen_pl.base.stop_signals` and `StopSignals`, and restores the handlers after training.

    Lightning's handler of SIGTERM would wait for the other ranks, which may have got none.
    """

    def register_signal_handlers(self) -> None:
        """Note the present handlers."""
        self.received_sigterm = False
        self._original_handlers = self._get_current_signal_handlers()


class _ReportError(pl.Callback):
    """Report this rank's error to the others before anything is closed, which may take long."""

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            ranks.leave()
        elif isinstance(exception, Stopped):
            # the end of the run tells the other ranks
            ending()
        else:
            ranks.report(exception)


def build_trainer(
    configured: dict[str, Any], *, callbacks: list[pl.Callback] | None = None, **settings: Any
) -> pl.Trainer:
    """Build a Trainer from the config's `trainer` and the run's own settings.

    Args:
        configured: The config's.
        callbacks: The run's.
        settings: Further arguments of Lightning's Trainer.

    Raises:
        ConfigError: Lightning does not accept the settings.
    """
    accelerator = choose_accelerator(configured.get("accelerator", "auto"))
    hint = "trainer.accelerator=cpu trainer.devices=1 trainer.strategy=auto run anywhere"
    with config_errors("trainer", hint=hint):
        strategy = build_strategy(
            configured.get("strategy", "auto"),
            ranks=_rank_count(configured, accelerator=accelerator),
            timeout_s=configured.get("timeout_s"),
            backend=None if accelerator == "cpu" else _GPU_BACKEND,
        )
        if accelerator != "cpu":
            _end_process_group_at_exit()
        changes = {
            "accelerator": accelerator,
            "strategy": strategy,
            "plugins": [CheckpointFiles(), ranks.cluster_environment()],
            # they are notified of an error, and of a change of phase, first
            "callbacks": [
                _ReportError(),
                RunClock(),
                *_phase_limits(configured),
                *(callbacks or []),
            ],
        }
        given = {name: value for name, value in configured.items() if name not in LIMITS}
        if given.get("check_val_every_n_epoch") == "auto":
            given["check_val_every_n_epoch"] = validation_interval(given.get("max_epochs"))
        # Lightning would add callbacks of its own for those that a run has not
        has = {
            "enable_progress_bar": bool(instances(callbacks or (), ProgressBar)),
            "enable_checkpointing": bool(instances(callbacks or (), Checkpoint)),
        }
        return RunTrainer(**(has | given | changes | settings))


def validation_interval(iterations: int | None) -> int:
    """Return the iterations between two validations of a run, for four to seven of them.

    Args:
        iterations: Number of iterations; None or -1 for no limit.

    >>> [validation_interval(iterations) for iterations in (2, 7, 15, 32, 60, -1)]
    [1, 1, 3, 8, 15, 20]
    """
    return _INTERVAL if iterations in (None, -1) else max(1, iterations // _VALIDATIONS)


def _phase_limits(configured: dict[str, Any]) -> list[pl.Callback]:
    if configured.get("timeout_s") is None:
        return []
    return [
        PhaseLimits(
            timeout_s=configured["timeout_s"],
            rollout_timeout_s=configured.get("rollout_timeout_s"),
            stall_s=configured.get("stall_s"),
        )
    ]


def _rank_count(configured: dict[str, Any], *, accelerator: str) -> int:
    devices = configured.get("devices", 1)
    if isinstance(devices, list):
        devices = len(devices)
    if devices in ("auto", -1):
        devices = 1 if accelerator == "cpu" else torch.cuda.device_count()
    return int(devices) * int(configured.get("num_nodes", 1))


def build_strategy(
    strategy: str | dict[str, Any],
    *,
    ranks: int = 1,
    timeout_s: float | None = None,
    backend: str | None = None,
) -> str | Strategy:
    """Return `trainer.strategy` as Lightning takes it: one of its names, or an object of a class with arguments.

    Args:
        strategy: A name, or a `_target_` with arguments.
        ranks: Number of ranks.
        timeout_s: Seconds after which a collective that waits for another rank fails; None for torch's own limit.
        backend: Backend of the process group; None for torch's choice.
    """
    common: dict[str, Any] = {
        "timeout": None if timeout_s is None else timedelta(seconds=timeout_s),
        "process_group_backend": backend,
    }
    common = {name: value for name, value in common.items() if value is not None}
    if isinstance(strategy, dict):
        made, given = get_object(str(strategy["_target_"])), strategy
        built: Strategy = instantiate(given, **_accepted(made, common, but=given))
        return built
    if strategy == "auto" and ranks > 1 and not hasattr(sys, "ps1"):
        # as Lightning chooses, but in a notebook
        strategy = "ddp"
    if strategy == "fsdp2":
        from ragen_pl.run.strategy import FSDP2Strategy

        return FSDP2Strategy(**common)
    if strategy == "auto" or strategy not in StrategyRegistry:
        return strategy
    entry = StrategyRegistry[strategy]
    return entry["strategy"](**entry["init_params"], **_accepted(entry["strategy"], common))


def _accepted(made: Any, settings: dict[str, Any], *, but: Any = ()) -> dict[str, Any]:
    """Return the settings that a class or function takes and that are not given already."""
    known = inspect.signature(made).parameters
    return {name: value for name, value in settings.items() if name in known and name not in but}
