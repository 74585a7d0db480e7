"""Callbacks that send a signal to a rank of a run once, however often the run is started."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from support.runs.killing import KillAt

from ragen_pl.trajectory import Trajectory


class KillOnce(KillAt):
    """Send a signal to this process at one moment of the run, in its first start that comes there.

    Args:
        moment: as in `KillAt`, or `preparing-I`: before the samples of iteration I are prepared; `saving-N`: while a
            checkpoint after N optimizer steps is written.
        rank: rank of the process.
        signal_name: name of the signal.
    """

    def _at(self, trainer: pl.Trainer, moment: str) -> None:
        note = Path(trainer.default_root_dir) / f"killed_{self.moment}"
        if moment == self.moment and trainer.global_rank == self.rank and not note.exists():
            note.touch()
            self._act()

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        prepare = getattr(module, "prepare", None)
        if prepare is None:  # of the warm start
            return

        def prepared(*arguments: Any, **settings: Any) -> Any:
            self._at(trainer, f"preparing-{trainer.current_epoch}")
            return prepare(*arguments, **settings)

        module.prepare = prepared  # type: ignore[assignment]

    def on_rollout_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, trajectories: list[Trajectory]
    ) -> None:
        self._at(trainer, f"rolled_out-{trainer.current_epoch}")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._at(trainer, f"saving-{trainer.global_step}")


class SignalStep(KillOnce):
    """Have SLURM send a signal to all ranks once, as before the end of a job's time."""

    def _act(self) -> None:
        step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
        # in a session of its own, for the signal is sent to the process group of the rank
        command = ["scancel", f"--signal={self.signal.name}", step]
        subprocess.run(command, check=True, start_new_session=True)


class CutCable(KillOnce):
    """Cut the cable between the two machines of two_nodes.sh once.

    Args:
        moment: As in `KillOnce`.
        rank: Rank of the process that cuts it.
        seconds: Time after which it is whole again; None for never.
    """

    def __init__(self, *, moment: str, rank: int = 0, seconds: float | None = None) -> None:
        super().__init__(moment=moment, rank=rank)
        self.seconds = seconds

    def _act(self) -> None:
        link = f"ip link set {os.environ['GLOO_SOCKET_IFNAME']}"
        again = "" if self.seconds is None else f" && sleep {self.seconds:g} && {link} up"
        # in a session of its own: the cable is mended even where the ranks end meanwhile
        subprocess.Popen(["sh", "-c", f"{link} down{again}"], start_new_session=True)
