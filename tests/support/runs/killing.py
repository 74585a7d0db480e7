"""Callbacks and a reward for the tests of whole jobs: they end their process, fail, wait, or record what it did."""

from __future__ import annotations

import builtins
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn

from envs.policies import OptimalPolicy
from ragen_pl.engines.errors import RolloutError
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.loops.rollout_update import RolloutUpdateLoop
from ragen_pl.trajectory import Trajectory


class KillAt(RolloutCallback):
    """Send a signal to this process at one moment of its run.

    Args:
        moment: `warm_start-N`: before optimizer step N of the warm start; `rollout-I-N`: when N episodes of
            iteration I are done; `step-N`: before optimizer step N; `trained-N`: at the start of a minibatch
            after N steps; `validation-I`: at the start of the validation of iteration I; `validating-I-N`: after
            its batch N; `begin-I`: before iteration I; `alone`: at the start of a validation outside of training.
        rank: rank of the process.
        signal_name: name of the signal.
    """

    in_warm_start = True

    def __init__(self, *, moment: str, rank: int = 0, signal_name: str = "SIGKILL") -> None:
        self.moment, self.rank = moment, rank
        self.signal = signal.Signals[signal_name]

    def _at(self, trainer: pl.Trainer, moment: str) -> None:
        if moment == self.moment and trainer.global_rank == self.rank:
            (Path(trainer.default_root_dir) / "killed").touch()
            self._act()

    def _act(self) -> None:
        os.kill(os.getpid(), self.signal)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        phase = "step" if isinstance(trainer.fit_loop, RolloutUpdateLoop) else "warm_start"
        self._at(trainer, f"{phase}-{trainer.global_step}")

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if isinstance(trainer.fit_loop, RolloutUpdateLoop):
            self._at(trainer, f"trained-{trainer.global_step}")

    def on_rollout_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._at(trainer, f"begin-{trainer.current_epoch}")

    def on_rollout_progress(
        self, trainer: pl.Trainer, module: pl.LightningModule, done: int, total: int
    ) -> None:
        for number in range(1, done + 1):
            self._at(trainer, f"rollout-{trainer.current_epoch}-{number}")

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._at(trainer, "alone")
        if trainer.global_step:
            self._at(trainer, f"validation-{trainer.current_epoch}")

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.global_step:
            self._at(trainer, f"validating-{trainer.current_epoch}-{batch_idx}")


class RaiseAt(KillAt):
    """Raise an error at one moment of a run, or in what the class's own hooks add.

    Args:
        moment: as in `KillAt`, or `saving`: while a checkpoint is written.
        rank: rank of the process.
        error: name of a built-in error, or `RolloutError`.
    """

    def __init__(self, *, moment: str, rank: int = 0, error: str = "KeyError") -> None:
        super().__init__(moment=moment, rank=rank)
        self.error = error

    def _act(self) -> None:
        kind = RolloutError if self.error == "RolloutError" else getattr(builtins, self.error)
        raise kind("raised by a test")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        self._at(trainer, "saving")


class FailingReward:
    """Reward function that raises an error on one rank.

    Args:
        rank: rank of the process.
    """

    def __init__(self, *, rank: int) -> None:
        self.rank = rank

    def __call__(
        self, trajectories: Sequence[Trajectory], *, gather: Callable[..., object]
    ) -> None:
        if torch.distributed.get_rank() == self.rank:
            raise KeyError("raised by a test")


class FailingDemonstrator(OptimalPolicy):
    """Demonstrator that raises an error on one rank.

    Args:
        rank: rank of the process.
    """

    def __init__(self, *, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def act(self, env: gymnasium.Env[Any, Any], rng: np.random.Generator) -> int | str:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == self.rank:
            raise KeyError("raised by a test")
        return super().act(env, rng)


class Pace(RolloutCallback):
    """Wait before each iteration, so that a run of minutes needs little computing.

    Args:
        seconds: length of the pause.
    """

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds

    def on_rollout_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        time.sleep(self.seconds)


class SaveAndKill(RolloutCallback):
    """Write `last.ckpt` inside the first optimizer step of an iteration, then kill the first rank.

    Args:
        iteration: Number of the iteration, with several minibatches in a step.
    """

    def __init__(self, *, iteration: int) -> None:
        self.iteration = iteration

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, *arguments: object
    ) -> None:
        loop = trainer.fit_loop
        if isinstance(loop, RolloutUpdateLoop) and trainer.current_epoch == self.iteration:
            assert loop.minibatches_to_step == 1
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt")
            if trainer.global_rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Record(RolloutCallback):
    """Write this rank's responses of every iteration and a digest of its last weights to a JSON file.

    Args:
        folder: gets `rank_<number>.json`.
    """

    def __init__(self, *, folder: str) -> None:
        self.folder = Path(folder)
        self.responses: dict[str, list[list[int]]] = {}

    def on_rollout_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, trajectories: list[Trajectory]
    ) -> None:
        for trajectory in trajectories:
            key = f"{trainer.current_epoch} {trajectory.group} {trajectory.member}"
            self.responses[key] = [turn.response_ids.tolist() for turn in trajectory.turns]

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        digest = hashlib.sha256()
        for parameter in module.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        record = {"responses": self.responses, "weights": digest.hexdigest()}
        file = self.folder / f"rank_{trainer.global_rank}.json"
        file.write_text(json.dumps(record))


class RecordEpisodes(RolloutCallback):
    """Append each episode that a rank has played to a file, as a line of JSON, however the process ends later.

    Args:
        file: gets the lines of all ranks.
    """

    def __init__(self, *, file: str) -> None:
        self.file = Path(file)

    def on_rollout_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, trajectories: list[Trajectory]
    ) -> None:
        lines = [
            {
                "episode": [trainer.current_epoch, one.group, one.member],
                "seed": one.seed,
                "first_prompt": one.turns[0].prompt_ids.tolist(),
                "responses": [turn.response_ids.tolist() for turn in one.turns],
                "ranks": trainer.world_size,
            }
            for one in trajectories
        ]
        with self.file.open("a") as stream:
            stream.write("".join(f"{json.dumps(line)}\n" for line in lines))
