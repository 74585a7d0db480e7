"""A few episodes of a run, kept to be read: whole records as JSONL, their images as files and strips."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.loggers import MLFlowLogger
from PIL import Image

from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.trajectory import Trajectory
from ragen_pl.viewing.images import beside, enlarged
from ragen_pl.viewing.page import PAGE, write_page
from ragen_pl.viewing.records import Origin, TokenCredit, TokenReader, write_episodes
from ragen_pl.viewing.token_credit import token_credit
from ragen_pl.viewing.traces import flush_traces, trace_records

_GAP = 4  # pixels between the images of a strip
_HEIGHT = 96  # pixels that smaller images are enlarged to


class LogTrajectories(RolloutCallback):
    """Keep episodes of every n-th iteration under the run's folder and in MLflow.

    They lie in `trajectories/iteration_<n>/`, and under the same path among MLflow's artifacts: the
    records of `ragen_pl.viewing.records` with the update's values, advantages and masks, and a page
    to look at them (`page.html`). Some of them are MLflow traces too.

    Args:
        every_n_iterations: iterations from one look to the next; the first is always looked at.
        count: episodes kept at a look, spread evenly over the iteration's; groups are kept whole.
        traces: as many of them at a look become MLflow traces.
    """

    def __init__(self, *, every_n_iterations: int = 10, count: int = 4, traces: int = 2) -> None:
        if every_n_iterations < 1 or count < 0 or traces < 0:
            raise ValueError(
                f"every_n_iterations={every_n_iterations}, count={count} and traces={traces}: "
                "expected at least 1, 0 and 0"
            )
        self.every_n_iterations, self.count, self.traces = every_n_iterations, count, traces

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
        datamodule = getattr(trainer, "datamodule", None)
        has_critic = getattr(pl_module, "critic", None) is not None
        credit = token_credit(getattr(datamodule, "buffer", None), trajectories, values=has_critic)
        name = f"trajectories/iteration_{iteration:04d}"
        folder = Path(trainer.default_root_dir) / name
        kept = chosen([one.group for one in trajectories], count=self.count)
        records = write_trajectories(
            [trajectories[index] for index in kept],
            folder=folder,
            credit=[credit[index] for index in kept],
            reader=getattr(getattr(datamodule, "proxy", None), "context", None),
            origin=Origin(iteration=iteration),
        )
        title = "/".join([*Path(trainer.default_root_dir).parts[-2:], f"iteration {iteration}"])
        write_page(records, folder / PAGE, title=title, played=len(trajectories))
        for logger in trainer.loggers:
            if isinstance(logger, MLFlowLogger):
                logger.experiment.log_artifacts(logger.run_id, str(folder), name)
                trace_records(
                    records[: self.traces], images=folder, uri=str(logger._tracking_uri),
                    experiment_id=str(logger.experiment_id), run_id=str(logger.run_id),
                )  # fmt: skip

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the last traces to be stored."""
        if trainer.is_global_zero and any(isinstance(one, MLFlowLogger) for one in trainer.loggers):
            flush_traces()


def chosen(groups: Sequence[int], *, count: int) -> list[int]:
    """Return the indices of about `count` episodes: whole groups, spread evenly over all.

    Args:
        groups: the group of each episode.
        count: how many; rounded up to whole groups.

    >>> chosen([0, 1, 2, 3, 4, 5], count=3), chosen([7], count=3), chosen([1, 1, 2, 2], count=1)
    ([0, 2, 4], [0], [0, 1])
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    size = max(map(len, members.values()), default=1)
    wanted = min(-(-count // size), len(members))
    every = list(members.values())
    return [index for number in range(wanted) for index in every[number * len(members) // wanted]]


def write_trajectories(
    trajectories: Sequence[Trajectory],
    *,
    folder: Path,
    credit: Sequence[TokenCredit | None] | None = None,
    reader: TokenReader | None = None,
    origin: Origin | None = None,
) -> list[dict[str, Any]]:
    """Write the episodes' records and images, and a strip `<number>.png` of each that has images.

    Returns:
        The records.
    """
    records = write_episodes(trajectories, folder, reader=reader, credit=credit, origin=origin)
    for number, trajectory in enumerate(trajectories):
        seen = [image for turn in trajectory.turns for image in turn.observation.images]
        seen += trajectory.final_images
        if seen:
            Image.fromarray(strip(seen)).save(folder / f"{number}.png")
    return records


def strip(images: Sequence[np.ndarray]) -> np.ndarray:
    """Return images side by side, small ones enlarged by a whole factor.

    Args:
        images: each uint8 [height, width, 3], of any size.

    Returns:
        uint8 [height, width, 3] on white.
    """
    large = [enlarged(image, factor=_HEIGHT // image.shape[0]) for image in images]
    return beside(large, gap=_GAP)
