"""Usable episodes of an iteration after failures."""

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
class UsableEpisodes:
    """Episodes of an iteration that can be trained on.

    Attributes:
        trajectories: Those of this rank that belong to a group with enough members.
        played: Number of episodes over all ranks.
        count: Number of `trajectories` over all ranks.
        failed: Number of failed episodes over all ranks.
        dropped_groups: Number of groups with too few members over all ranks.
        left_out: Number of episodes over all ranks that are left out for an error of their simulated user.
    """

    trajectories: list[Trajectory] = field(default_factory=list)
    played: int = 0
    count: int = 0
    failed: int = 0
    dropped_groups: int = 0
    left_out: int = 0

    def __add__(self, other: UsableEpisodes) -> UsableEpisodes:
        """Return the episodes of two rollouts, which have no group in common."""
        return UsableEpisodes(
            trajectories=[*self.trajectories, *other.trajectories],
            played=self.played + other.played,
            count=self.count + other.count,
            failed=self.failed + other.failed,
            dropped_groups=self.dropped_groups + other.dropped_groups,
            left_out=self.left_out + other.left_out,
        )

    @property
    def fraction(self) -> float:
        """Fraction of the episodes that is usable, of those that are not left out."""
        kept = self.played - self.left_out
        return self.count / kept if kept else 0.0

    def is_enough(self, settings: FailureSettings) -> bool:
        """Return whether they are enough for an iteration; the same on every rank."""
        return self.count > 0 and self.fraction >= settings.min_fraction - 1e-9


def usable_episodes(
    trajectories: Sequence[Trajectory],
    settings: FailureSettings,
    *,
    leave_out_user_errors: bool = False,
) -> UsableEpisodes:
    """Return the episodes of an iteration that can be trained on. All ranks must call it.

    Args:
        trajectories: Trajectories of this rank; groups are whole on a rank.
        settings: Fraction of a group's episodes that it needs. A seat without a turn is no failure, so a group of a
            game's seat has the episodes in which it had one.
        leave_out_user_errors: Whether those of an agent whose simulated user has made an error are left out; they are
            no failures, as a seat without a turn.

    Raises:
        RolloutError: All are left out, or there are none.
    """
    kept = [one for one in trajectories if not (leave_out_user_errors and _is_misled(one))]
    sound = [one for one in kept if one.status is not EpisodeStatus.FAILED]
    sizes = Counter(one.group for one in kept)
    members = Counter(one.group for one in sound)
    # less the noise of a product
    needed = {group: settings.min_group_fraction * size - 1e-9 for group, size in sizes.items()}
    dropped = {group for group in sizes if members[group] < max(needed[group], 1)}
    usable = [one for one in sound if one.group not in dropped]
    numbers = [len(trajectories), len(usable), len(kept) - len(sound), len(dropped)]
    counts = [*numbers, len(trajectories) - len(kept)]
    played, count, failed, groups, left_out = sum_over_ranks(torch.tensor(counts)).tolist()
    if left_out == played:
        raise RolloutError(
            f"rollout.leave_out_user_errors=true: the simulated user has made an error in all {played} episodes, and "
            "none is left to train on; give it weights that make fewer, or set leave_out_user_errors=false"
            if left_out
            else "the policy had no turn in any episode of the iteration: another seat has ended all of them before"
        )
    return UsableEpisodes(
        trajectories=usable,
        played=played,
        count=count,
        failed=failed,
        dropped_groups=groups,
        left_out=left_out,
    )


def _is_misled(one: Trajectory) -> bool:
    """Return whether a trajectory is that of an agent whose simulated user has made an error."""
    return one.user_erred and not one.is_user and one.status is not EpisodeStatus.FAILED


def seats_without_turn(trajectories: Sequence[Trajectory]) -> float | None:
    """Return how many seats had no turn before their game ended, None without games. All ranks must call it.

    Of games against an earlier policy, which count for their win rate, there is the policy's seat only.

    Args:
        trajectories: Trajectories of this rank; games are whole on a rank.
    """
    games = {
        (one.game, one.member): one.seats if one.opponent is None else 1
        for one in trajectories
        if one.seats > 1
    }
    played = sum(one.seats > 1 for one in trajectories)
    counts = torch.tensor([len(games), sum(games.values()) - played], dtype=torch.float64)
    of_all, silent = sum_over_ranks(counts).tolist()
    return silent if of_all else None


def too_few(
    usable: UsableEpisodes,
    trajectories: Sequence[Trajectory],
    settings: FailureSettings,
    *,
    iteration: int,
) -> RolloutError:
    """Return the error of an iteration that has too few usable episodes. All ranks must call it.

    Args:
        usable: Episodes that can be trained on.
        trajectories: All trajectories of this rank.
        settings: The limits.
        iteration: Number of the iteration, from 0.
    """
    errors = [error for part in gather_over_ranks(errors_of(trajectories)) for error in part]
    groups = f" and drop {usable.dropped_groups} groups" if usable.dropped_groups else ""
    return RolloutError(
        f"iteration {iteration + 1}: {usable.failed} of {usable.played} episodes failed{groups}; {usable.fraction:.2g} "
        f"of the iteration can be trained on, less than rollout.failures.min_fraction={settings.min_fraction:g}, after "
        f"it was played twice; most failed with {most_common(errors)}"
    )
