"""Groups that this rank trains on.

The filter judges the groups of all ranks together. The groups that it keeps are distributed over the ranks anew,
whole groups at a time, so the ranks have about the same number of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ragen_pl.algorithms.group_filter import GroupFilter, rank_groups
from ragen_pl.base.distributed import exchanged, gather_over_ranks, rank, values_of, world_size
from ragen_pl.data.collate import usable
from ragen_pl.engines.errors import RolloutError
from ragen_pl.trajectory import Trajectory

Return = Callable[[Trajectory], float]


@dataclass(slots=True)
class GroupSelection:
    """Trajectories that this rank trains on."""

    trajectories: list[Trajectory]
    weights: list[float]
    """Factors of the policy's loss, one for each trajectory."""
    metrics: dict[str, float]
    """The same on every rank."""
    groups: int
    """Number of groups kept over all ranks, of each seat where there are several."""
    episodes: int
    """Number of their episodes."""
    is_dummy: bool = False
    """This rank has no group of its own: its one trajectory must not count."""


def select_groups(
    trajectories: Sequence[Trajectory],
    group_filter: GroupFilter,
    *,
    returns: Return,
    limit: int | None = None,
) -> GroupSelection:
    """Judge the groups of all ranks and return this rank's part of those kept.

    If no group passes, the one with the highest deviation is kept, so an update always has a batch.

    Args:
        trajectories: Trajectories of this rank; groups are whole on a rank.
        group_filter: The filter.
        returns: Return of a trajectory.
        limit: Maximum number of groups to keep, of each seat where there are several; the first of those that passed.

    Raises:
        RolloutError: No rank has a trajectory with a response that is trained on.
    """
    local = [trajectory for trajectory in trajectories if usable(trajectory)]
    table = gather_over_ranks([(trajectory.group, returns(trajectory)) for trajectory in local])
    seats = max(gather_over_ranks(max((one.seats for one in local), default=1)))
    owner = {group: number for number, rows in enumerate(table) for group, _ in rows}
    judged = sorted(row for rows in table for row in rows)
    if not judged:
        raise RolloutError("no response is trained on: all have metadata.train=false, or x-train")
    group = torch.tensor([row[0] for row in judged], dtype=torch.int64)
    of_all = torch.tensor([row[1] for row in judged])
    result = group_filter(of_all, group, limit=None if limit is None else limit * seats)
    weight = dict(zip(group.tolist(), result.weight.tolist(), strict=True))
    kept = torch.unique(group[result.keep]).tolist()
    metrics = {"kept_share": result.kept_fraction, "kept_deviation": result.deviation}
    if not kept:
        kept = rank_groups(of_all, group)[0][:1].tolist()
        weight[kept[0]] = 1.0
    target = _target_ranks(kept, owner, ranks=world_size())
    own, is_dummy = _distribute(local, kept, owner, target)
    weights = [weight[trajectory.group] for trajectory in own]
    episodes = sum(number in target for number, _ in judged)
    return GroupSelection(own, weights, metrics, len(kept) // seats, episodes, is_dummy)


def _distribute(
    local: list[Trajectory], kept: list[int], owner: dict[int, int], target: dict[int, int]
) -> tuple[list[Trajectory], bool]:
    """Return this rank's trajectories and whether they are a dummy; the ranks differ by one group at most."""
    own = [trajectory for trajectory in local if target.get(trajectory.group) == rank()]
    if any(target[group] != owner[group] for group in kept):
        moving: dict[int, list[Trajectory]] = {}
        for trajectory in local:
            receiver = target.get(trajectory.group, rank())
            if receiver != rank():
                moving.setdefault(receiver, []).append(trajectory)
        own += [trajectory for part in exchanged(moving) for trajectory in part]
        own.sort(key=lambda trajectory: (trajectory.group, trajectory.member))
    if len(kept) >= world_size():
        return own, False
    [dummy] = values_of([target[kept[0]]], own[:1])
    return (own, False) if own else (dummy, True)


def _target_ranks(kept: list[int], owner: dict[int, int], *, ranks: int) -> dict[int, int]:
    """Return the rank of each group: its own if that has room, else the first with room left."""
    room = [len(kept) // ranks + (number < len(kept) % ranks) for number in range(ranks)]
    target: dict[int, int] = {}
    for group in kept:
        if room[owner[group]]:
            target[group] = owner[group]
            room[owner[group]] -= 1
    for group in kept:
        if group not in target:
            target[group] = next(number for number, free in enumerate(room) if free)
            room[target[group]] -= 1
    return target
