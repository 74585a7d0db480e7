"""LogTrajectories: keep some episodes of a run as records, images, a page and MLflow traces."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from PIL import Image

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, CountOrZero
from ragen_pl.base.distributed import gather_over_ranks
from ragen_pl.base.files import atomic_write, disk_errors_of
from ragen_pl.base.instances import instances
from ragen_pl.base.records import Origin, TokenCredit, sample_groups, write_episodes
from ragen_pl.callbacks.access import (
    KeepsTraces,
    RemovesFiles,
    agent_of,
    log_files,
    rollouts_of,
    run_folder,
    run_title,
)
from ragen_pl.data.datamodule import RolloutDataModule
from ragen_pl.data.validation import HELD_OUT, ValidationChunk
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.trajectory import EpisodeStatus, Trajectory
from ragen_pl.viewing.images import beside, enlarged
from ragen_pl.viewing.page import PAGE, PLAYED, outcomes, write_page
from ragen_pl.viewing.token_credit import token_credit

# Pixels: the gap between the images of a strip, the height that smaller images are enlarged to.
_GAP = 4
_HEIGHT = 96
_FOLDER, _NAME, _VALIDATION = "trajectories", "iteration_", "validation_"
# environment, status and success of an episode
_Ended = tuple[str | None, EpisodeStatus, bool]


class LogTrajectories(RolloutCallback):
    """Keep episodes of every n-th iteration in the run's folder and in MLflow.

    `trajectories/iteration_<n>/` holds the records of `ragen_pl.base.records` with the update's values,
    advantages and masks, a strip of images for each episode, and the page `page.html`. MLflow has the same
    files as artifacts, and some of the episodes as traces. `trajectories/validation_<n>/` has records and page of some
    episodes of the validation set, played after n iterations, those without success first.

    The folders of the first iteration, of the newest ones, and the first at or after each power of two stay, so that
    their number hardly grows. MLflow keeps the same ones, and all traces.

    Args:
        every_n_iterations: Interval in iterations; the first iteration is always kept.
        count: Approximate number of episodes kept: whole groups, spread evenly over the iteration's. In a mixture, of
            each environment, which has a page `page_<environment>.html` of its own too.
        traces: Number of the kept episodes that become MLflow traces.
        keep_last: Number of the newest iterations whose folders stay; None for all.
    """

    needs_trust = ()

    @checked
    def __init__(
        self,
        *,
        every_n_iterations: Count = 10,
        count: CountOrZero = 4,
        traces: CountOrZero = 2,
        keep_last: Count | None = 10,
    ) -> None:
        self.every_n_iterations, self.count, self.traces = every_n_iterations, count, traces
        self.keep_last = keep_last
        # by the number of the validation set
        self._validation: dict[int, list[Trajectory]] = defaultdict(list)
        # environment, status and success of all of its episodes
        self._validated: list[_Ended] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drop the folders of iterations after the checkpoint that the run goes on from, which come again."""
        if not trainer.is_global_zero:
            return
        for prefix in (_NAME, _VALIDATION):
            folders = _numbered(run_folder(trainer) / _FOLDER, prefix)
            later = [one for number, one in folders.items() if number > trainer.current_epoch]
            self._remove(trainer, later)

    def on_rollout_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        trajectories: Sequence[Trajectory],
    ) -> None:
        """Write some of the trajectories of rank 0. All ranks call it: a page states how those of all have ended."""
        iteration = trainer.current_epoch
        if iteration % self.every_n_iterations:
            return
        played = _of_all_ranks(map(_ended, trajectories))
        if not trainer.is_global_zero:
            return
        name = f"{_FOLDER}/{_NAME}{iteration:04d}"
        folder = run_folder(trainer) / name
        datamodule = rollouts_of(trainer)
        reader = None if datamodule is None else datamodule.proxy.context
        credit = _credit(datamodule, pl_module, trajectories)
        kept = _sampled(trajectories, count=self.count)
        records = write_episodes(
            [trajectories[index] for index in kept],
            folder,
            reader=reader,
            credit=[credit[index] for index in kept],
            origin=Origin(iteration=iteration),
        )
        write_strips([trajectories[index] for index in kept], folder)
        title = f"{run_title(trainer)}/iteration {iteration}"
        _write_pages(records, folder, title=title, played=played)
        log_files(trainer, folder, place=name)
        for logger in instances(trainer.loggers, KeepsTraces) if self.traces else ():
            logger.log_traces(folder, count=self.traces)
        self._remove_others(trainer, folder.parent, _NAME)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Forget the episodes of another validation."""
        self._validation.clear()
        self._validated = []

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep some episodes of the first validation set, in a mixture of each; those without success first."""
        first = dataloader_idx == 0
        mixed = isinstance(batch, ValidationChunk) and batch.validation_set.environment
        if not (first or mixed) or not isinstance(outputs, Mapping):
            return
        kept, played = self._validation[dataloader_idx], outputs.get("trajectories", ())
        self._validated += map(_ended, played)
        kept += played
        kept.sort(key=lambda one: bool(one.success))
        del kept[self.count :]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the kept episodes of rank 0. All ranks call it, as `on_rollout_end`."""
        played = [one for kept in self._validation.values() for one in kept]
        self._validation.clear()
        if trainer.sanity_checking:
            return
        validated = _of_all_ranks(self._validated)
        if not played or not trainer.is_global_zero:
            return
        iteration = trainer.fit_loop.epoch_progress.current.ready
        name = f"{_FOLDER}/{_VALIDATION}{iteration:04d}"
        folder = run_folder(trainer) / name
        datamodule = rollouts_of(trainer)
        reader = None if datamodule is None else datamodule.proxy.context
        origin = Origin(iteration=iteration, validation_set=HELD_OUT)
        records = write_episodes(played, folder, reader=reader, origin=origin)
        title = f"{run_title(trainer)}/validation after {iteration} iterations"
        _write_pages(records, folder, title=title, played=validated)
        self._remove_others(trainer, folder.parent, _VALIDATION)

    def _remove_others(self, trainer: pl.Trainer, folder: Path, prefix: str) -> None:
        """Remove the folders of iterations that do not stay."""
        if self.keep_last is None:
            return
        folders = _numbered(folder, prefix)
        stay = staying(folders, newest=self.keep_last)
        self._remove(trainer, [folders[number] for number in sorted(folders.keys() - stay)])

    def _remove(self, trainer: pl.Trainer, folders: Iterable[Path]) -> None:
        for folder in folders:
            shutil.rmtree(folder)
            for logger in instances(trainer.loggers, RemovesFiles):
                logger.remove_files(f"{_FOLDER}/{folder.name}")


def _numbered(folder: Path, prefix: str) -> dict[int, Path]:
    """Return the folders of a prefix by the number of the iteration in their names."""
    named = {one.name.removeprefix(prefix): one for one in folder.glob(f"{prefix}*")}
    # others are copies of somebody's
    return {int(number): one for number, one in named.items() if number.isdecimal()}


def staying(iterations: Collection[int], *, newest: int) -> set[int]:
    """Return the first iteration, the newest ones, and the first at or after each power of two.

    What stays of some iterations and later ones is what stays of all of them.

    >>> sorted(staying(range(0, 1000, 10), newest=3))
    [0, 10, 20, 40, 70, 130, 260, 520, 970, 980, 990]
    """
    ordered = sorted(iterations)
    # numbers of as many bits are from one power of two to the next
    firsts = {number.bit_length(): number for number in reversed(ordered)}
    return {*firsts.values(), *ordered[:1], *ordered[-newest:]}


def _sampled(trajectories: Sequence[Trajectory], *, count: int) -> list[int]:
    """Return the indices of about `count` episodes of each environment, see `sample_groups`."""
    indices: dict[str | None, list[int]] = defaultdict(list)
    for index, one in enumerate(trajectories):
        indices[one.environment].append(index)
    return [
        own[place]
        for own in indices.values()
        for place in sample_groups([trajectories[index].group for index in own], count=count)
    ]


def _of_all_ranks(ended: Iterable[_Ended]) -> list[_Ended]:
    return [one for part in gather_over_ranks([*ended]) for one in part]


def _ended(trajectory: Trajectory) -> _Ended:
    return trajectory.environment, trajectory.status, bool(trajectory.success)


def _write_pages(
    records: Sequence[dict[str, Any]], folder: Path, *, title: str, played: Sequence[_Ended]
) -> None:
    """Write the page of records, one of each environment of a mixture, and how many episodes there were.

    Args:
        records: The episodes shown.
        folder: Their folder.
        title: Title of the page.
        played: All episodes, of which they are some.
    """
    names = dict.fromkeys(record["environment"] for record in records)
    pages = {None: PAGE} | {name: f"page_{name}.html" for name in names if name is not None}
    for name, file in pages.items():
        counts = outcomes(
            (status, success)
            for environment, status, success in played
            if name in (None, environment)
        )
        write_page(
            [record for record in records if name in (None, record["environment"])],
            folder / file,
            title=title if name is None else f"{title}, {name}",
            played=counts,
        )
        if name is None:
            with atomic_write(folder / PLAYED) as partial:
                partial.write_text(json.dumps(counts))


def _credit(
    datamodule: RolloutDataModule | None,
    pl_module: pl.LightningModule,
    trajectories: Sequence[Trajectory],
) -> list[TokenCredit | None]:
    batch, agent = None if datamodule is None else datamodule.buffer, agent_of(pl_module)
    has_critic = agent is not None and agent.critic is not None
    return token_credit(batch, trajectories, values=has_critic)


def write_strips(trajectories: Sequence[Trajectory], folder: Path) -> None:
    """Write a strip `<number>.png` of each episode that has images."""
    for number, trajectory in enumerate(trajectories):
        images = [image for turn in trajectory.turns for image in turn.observation.images]
        images += trajectory.final_images
        if images:
            file = folder / f"{number}.png"
            with disk_errors_of(file):
                Image.fromarray(strip(images)).save(file)


def strip(images: Sequence[np.ndarray]) -> np.ndarray:
    """Return images side by side, small ones enlarged by a whole factor.

    Args:
        images: Images of any size, each uint8 `[height, width, 3]`.

    Returns:
        Image on white, uint8 `[height, width, 3]`.
    """
    large = [enlarged(image, factor=_HEIGHT // image.shape[0]) for image in images]
    return beside(large, gap=_GAP)
