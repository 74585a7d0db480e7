"""Recorder: a digest of each iteration's trajectories, as a line of JSON."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import lightning.pytorch as pl

from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.trajectory import Trajectory


class Recorder(RolloutCallback):
    """Write a digest of what each rank has played to `rank_<number>.jsonl`. A repeated iteration has another line.

    Args:
        folder: Folder of the files.
    """

    def __init__(self, *, folder: str) -> None:
        self.folder = Path(folder)

    def on_rollout_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, trajectories: list[Trajectory]
    ) -> None:
        digest = hashlib.sha1()
        for one in sorted(trajectories, key=lambda played: (played.group, played.member)):
            digest.update(
                f"{one.group} {one.member} {one.seed} {one.status} {one.success}".encode()
            )
            for turn in one.turns:
                digest.update(turn.observation.text.encode())
                digest.update(turn.response_ids.tobytes() + turn.response_logprobs.tobytes())
                digest.update(f"{turn.actions} {turn.reward}".encode())
        line = {"iteration": trainer.current_epoch, "digest": digest.hexdigest()}
        with (self.folder / f"rank_{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
