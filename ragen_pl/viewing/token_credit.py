"""Per-token values of an update's batch, episode by episode, for the records."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragen_pl.base.records import TokenCredit
from ragen_pl.data.batch import TrajectoryBatch
from ragen_pl.data.collate import usable
from ragen_pl.trajectory import Span, Trajectory


def token_credit(
    batch: TrajectoryBatch | None, trajectories: Sequence[Trajectory], *, values: bool = True
) -> list[TokenCredit | None]:
    """Return the values, advantages and masks of the sampled tokens of a batch's trajectories.

    Args:
        batch: Batch after credit assignment; None if there is none.
        trajectories: Trajectories that were played, among them those of the batch.
        values: Whether a critic filled the batch's values.

    Returns:
        One entry a trajectory; None for a trajectory that is not in the batch.
    """
    if batch is None:
        return [None] * len(trajectories)
    samples, episodes = batch.samples, batch.episodes
    sampled = samples.sampled & (samples.spans != Span.SHOWN)
    order = samples.token[sampled].argsort()
    columns = {
        "advantages": samples.advantages,
        "returns": samples.returns,
        "loss_mask": samples.loss_mask,
        "advantage_mask": samples.advantage_mask,
    }
    if values:
        columns["values"] = samples.values
    flat = {name: column[sampled][order].cpu().numpy() for name, column in columns.items()}
    episode_of_token = samples.episode[:, None].expand_as(sampled)[sampled][order]
    sizes = torch.bincount(episode_of_token, minlength=len(episodes.turns))
    ends = sizes.cumsum(0).tolist()
    keys = zip(episodes.group.tolist(), episodes.member.tolist(), strict=True)
    slices = {
        key: slice(end - size, end)
        for key, end, size in zip(keys, ends, sizes.tolist(), strict=True)
    }
    credit: list[TokenCredit | None] = []
    for trajectory in trajectories:
        tokens = slices.get((trajectory.group, trajectory.member))
        if tokens is None or not usable(trajectory):
            credit.append(None)
        else:
            credit.append(TokenCredit(**{name: column[tokens] for name, column in flat.items()}))
    return credit
