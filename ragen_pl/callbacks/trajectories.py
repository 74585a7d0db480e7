"""A few trajectories of a run, kept to be read: their texts as JSON, their pictures as one strip each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers import MLFlowLogger
from PIL import Image

from ragen_pl.trajectory import Trajectory, Turn

_GAP = 4  # pixels between the pictures of a strip
_HEIGHT = 96  # pixels that smaller pictures are enlarged to


class LogTrajectories(pl.Callback):
    """Keep trajectories of every n-th iteration under the run's folder and in MLflow.

    They lie in `trajectories/iteration_<n>/`, and under the same path among MLflow's artifacts.

    Args:
        every_n_iterations: iterations from one look to the next; the first is always looked at.
        count: trajectories kept at a look, spread evenly over the iteration's.
    """

    def __init__(self, *, every_n_iterations: int = 10, count: int = 4) -> None:
        if every_n_iterations < 1 or count < 0:
            raise ValueError(
                f"every_n_iterations={every_n_iterations} and count={count}: expected at least 1 and 0"
            )
        self.every_n_iterations, self.count = every_n_iterations, count

    def on_rollout_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        trajectories: Sequence[Trajectory],
    ) -> None:
        """Write some of the trajectories, on rank 0."""
        iteration = trainer.current_epoch
        if not trainer.is_global_zero or iteration % self.every_n_iterations:
            return
        name = f"trajectories/iteration_{iteration:04d}"
        folder = Path(trainer.default_root_dir) / name
        write_trajectories(chosen(trajectories, count=self.count), folder=folder)
        for logger in trainer.loggers:
            if isinstance(logger, MLFlowLogger):
                logger.experiment.log_artifacts(logger.run_id, str(folder), name)


def chosen(trajectories: Sequence[Trajectory], *, count: int) -> list[Trajectory]:
    """Return `count` trajectories, spread evenly over all.

    >>> chosen([0, 1, 2, 3, 4, 5], count=3), chosen([7], count=3)
    ([0, 2, 4], [7])
    """
    count = min(count, len(trajectories))
    return [trajectories[index * len(trajectories) // count] for index in range(count)]


def write_trajectories(trajectories: Sequence[Trajectory], *, folder: Path) -> None:
    """Write a JSON file for each trajectory, and a picture strip where it has pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, trajectory in enumerate(trajectories):
        text = json.dumps(as_json(trajectory), indent=1, ensure_ascii=False, default=str)
        (folder / f"{number}.json").write_text(text, encoding="utf-8")
        pictures = [image for turn in trajectory.turns for image in turn.observation.images]
        pictures += trajectory.final_images
        if pictures:
            Image.fromarray(strip(pictures)).save(folder / f"{number}.png")


def as_json(trajectory: Trajectory) -> dict[str, object]:
    """Return what a reader wants to know of a trajectory, in JSON's types."""
    return {
        "group": trajectory.group,
        "member": trajectory.member,
        "seed": trajectory.seed,
        "ending": str(trajectory.ending),
        "success": bool(trajectory.success),
        "return": trajectory.reward,
        "difficulty": trajectory.difficulty,
        "error": trajectory.error,
        "turns": [_turn_as_json(turn) for turn in trajectory.turns],
    }


def _turn_as_json(turn: Turn) -> dict[str, object]:
    return {
        "observation": turn.observation.text,
        "reply": turn.reply_text,
        "think": turn.think,
        "actions": turn.actions,
        "valid": bool(turn.action_is_valid),
        "effective": bool(turn.action_is_effective),
        "cut": bool(turn.cut),
        "reward": float(turn.reward),
        "reply_tokens": len(turn.reply_ids),
        "logprob": float(np.sum(turn.reply_logprobs)),
        "entropy": float(turn.reply_entropy),
        "info": turn.info,
    }


def strip(pictures: Sequence[np.ndarray]) -> np.ndarray:
    """Return pictures side by side, small ones enlarged by a whole factor.

    Args:
        pictures: each uint8 [height, width, 3], of any size.

    Returns:
        uint8 [height, width, 3] on white.
    """
    enlarged = []
    for picture in pictures:
        factor = max(1, _HEIGHT // picture.shape[0])
        enlarged.append(picture.repeat(factor, axis=0).repeat(factor, axis=1))
    height = max(picture.shape[0] for picture in enlarged)
    width = sum(picture.shape[1] + _GAP for picture in enlarged) - _GAP
    canvas = np.full((height, width, 3), 255, dtype=np.uint8)
    left = 0
    for picture in enlarged:
        canvas[: picture.shape[0], left : left + picture.shape[1]] = picture
        left += picture.shape[1] + _GAP
    return canvas
