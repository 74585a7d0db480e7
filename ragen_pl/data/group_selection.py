"""Which of an iteration's trajectories are trained on, and on which rank.

The filter judges the groups of all ranks together; what it keeps is dealt out anew, whole groups at a
time, so that no rank is left without work where there is work for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ragen_pl.algorithms.group_filter import GroupFilter
from ragen_pl.data.collate import usable
from ragen_pl.distributed import gather_over_ranks, rank, world_size
from ragen_pl.trajectory import Trajectory

Return = Callable[[Trajectory], float]


@dataclass(slots=True)
class GroupSelection:
    """What this rank trains on."""

    trajectories: list[Trajectory]
    weights: list[float]  # times the policy's loss, one a trajectory
    metrics: dict[str, float]  # the same on every rank
    groups: int  # kept over all ranks
    filler: bool = False  # nothing fell to this rank: the one trajectory here must not count


def select_groups(
    trajectories: Sequence[Trajectory],
    group_filter: GroupFilter,
    *,
    returns: Return,
    most: int | None = None,
) -> GroupSelection:
    """Judge the groups of all ranks and return this rank's share of those kept.

    Where none passes, the one whose returns differ most is kept, so that an update has a batch.

    Args:
        trajectories: of this rank; groups are whole on a rank.
        group_filter: the rule.
        returns: what a trajectory is judged by.
        most: keep at most so many groups, the first of those that passed.
    """
    local = [one for one in trajectories if usable(one)]
    table = gather_over_ranks([(one.group, returns(one)) for one in local])
    owner = {group: number for number, rows in enumerate(table) for group, _ in rows}
    judged = sorted(row for rows in table for row in rows)
    group = torch.tensor([row[0] for row in judged], dtype=torch.int64)
    selection = group_filter(torch.tensor([row[1] for row in judged]), group)
    weight = dict(zip(group.tolist(), selection.weight.tolist(), strict=True))
    kept = torch.unique(group[selection.keep]).tolist()[:most]
    metrics = {"kept_share": selection.share, "kept_deviation": selection.deviation}
    if not kept:
        kept = [_most_different(judged)]
        weight[kept[0]] = 1.0
    mine, filler = _deal(local, kept, owner)
    return GroupSelection(mine, [weight[one.group] for one in mine], metrics, len(kept), filler)


def _most_different(judged: list[tuple[int, float]]) -> int:
    spread: dict[int, float] = {}
    for group in {row[0] for row in judged}:
        members = [value for number, value in judged if number == group]
        spread[group] = max(members) - min(members)
    return max(sorted(spread), key=spread.__getitem__)


def _deal(
    local: list[Trajectory], kept: list[int], owner: dict[int, int]
) -> tuple[list[Trajectory], bool]:
    """Return this rank's trajectories of the groups kept, each rank having as many groups give or take one."""
    ranks = world_size()
    where = _destinations(kept, owner, ranks=ranks)
    stay = [one for one in local if where.get(one.group) == rank()]
    moving = [one for one in local if where.get(one.group, rank()) != rank()]
    if any(where[group] != owner[group] for group in kept):
        arrived = [one for part in gather_over_ranks(moving) for one in part]
        stay += [one for one in arrived if where[one.group] == rank()]
        stay.sort(key=lambda one: (one.group, one.member))
    if len(kept) >= ranks:
        return stay, False
    spare = [one for one in stay if one.group == kept[0]][:1]
    spare = next(part for part in gather_over_ranks(spare) if part)
    return (stay, False) if stay else (spare, True)


def _destinations(kept: list[int], owner: dict[int, int], *, ranks: int) -> dict[int, int]:
    """Return the rank of each group: its own where that has room, else the first with room left."""
    room = [len(kept) // ranks + (number < len(kept) % ranks) for number in range(ranks)]
    where: dict[int, int] = {}
    for group in kept:
        if room[owner[group]]:
            where[group] = owner[group]
            room[owner[group]] -= 1
    for group in kept:
        if group not in where:
            where[group] = next(number for number, free in enumerate(room) if free)
            room[where[group]] -= 1
    return where
