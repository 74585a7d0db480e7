"""Episodes of an iteration that are left to train on where some have failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ragen_pl.base.distributed import gather_over_ranks, sum_over_ranks
from ragen_pl.engines.errors import RolloutError
from ragen_pl.rollout.failures import errors_of, most_common
from ragen_pl.rollout.settings import FailureSettings
from ragen_pl.trajectory import EpisodeStatus, Trajectory


@dataclass(kw_only=True, slots=True)
class Remaining:
    """Episodes of an iteration that are left to train on.

    Attributes:
        trajectories: those of this rank that belong to a group with enough members.
        all: number of episodes over all ranks.
        left: number of `trajectories` over all ranks.
        failed: number of failed episodes over all ranks.
        dropped_groups: number of groups with too few members over all ranks.
    """

    trajectories: list[Trajectory] = field(default_factory=list)
    all: int = 0
    left: int = 0
    failed: int = 0
    dropped_groups: int = 0

    def __add__(self, other: Remaining) -> Remaining:
        """Return the episodes of two rollouts, which have no group in common."""
        return Remaining(
            trajectories=[*self.trajectories, *other.trajectories],
            all=self.all + other.all,
            left=self.left + other.left,
            failed=self.failed + other.failed,
            dropped_groups=self.dropped_groups + other.dropped_groups,
        )

    @property
    def fraction(self) -> float:
        """Fraction of the episodes that is left."""
        return self.left / self.all if self.all else 0.0

    def is_enough(self, settings: FailureSettings) -> bool:
        """Return whether an iteration can train on what is left; the same on every rank."""
        return self.left > 0 and self.fraction >= settings.min_fraction - 1e-9


def remaining(
    trajectories: Sequence[Trajectory], settings: FailureSettings, *, group_size: int
) -> Remaining:
    """Return the episodes of an iteration that are left to train on. All ranks must call it.

    Args:
        trajectories: trajectories of this rank; groups are whole on a rank.
        settings: fraction of a group's episodes that it needs.
        group_size: number of a group's episodes.
    """
    sound = [one for one in trajectories if one.status is not EpisodeStatus.FAILED]
    members = Counter(one.group for one in sound)
    # less the noise of a product
    needed = settings.min_group_fraction * group_size - 1e-9
    dropped = {one.group for one in trajectories if members[one.group] < max(needed, 1)}
    left = [one for one in sound if one.group not in dropped]
    counts = [len(trajectories), len(left), len(trajectories) - len(sound), len(dropped)]
    summed = sum_over_ranks(torch.tensor(counts, dtype=torch.float64)).tolist()
    total, kept, failed, groups = (int(count) for count in summed)
    return Remaining(trajectories=left, all=total, left=kept, failed=failed, dropped_groups=groups)


def too_few(
    left: Remaining,
    trajectories: Sequence[Trajectory],
    settings: FailureSettings,
    *,
    iteration: int,
) -> RolloutError:
    """Return the error of an iteration that has too few episodes left. All ranks must call it.

    Args:
        left: episodes that are left.
        trajectories: all trajectories of this rank.
        settings: the limits.
        iteration: number of the iteration, from 0.
    """
    errors = [error for part in gather_over_ranks(errors_of(trajectories)) for error in part]
    groups = f" and drop {left.dropped_groups} groups" if left.dropped_groups else ""
    return RolloutError(
        f"iteration {iteration + 1}: {left.failed} of {left.all} episodes failed{groups}; {left.fraction:.2g} of the "
        f"iteration can be trained on, less than rollout.failures.min_fraction={settings.min_fraction:g}, after it was "
        f"played twice; most failed with {most_common(errors)}"
    )
