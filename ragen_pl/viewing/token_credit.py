"""Credit per token taken out of an update's batch, episode by episode."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragen_pl.data.batch import TrajectoryBatch
from ragen_pl.data.collate import usable
from ragen_pl.trajectory import Span, Trajectory
from ragen_pl.viewing.records import TokenCredit


def token_credit(
    batch: TrajectoryBatch | None, trajectories: Sequence[Trajectory], *, values: bool = True
) -> list[TokenCredit | None]:
    """Return what a prepared batch knows of the sampled tokens of the trajectories it was collated from.

    Args:
        batch: after credit was assigned; None where there is none.
        trajectories: those that were played.
        values: whether a critic filled the batch's values in.

    Returns:
        One entry a trajectory; None for those that are not in the batch.
    """
    if batch is None:
        return [None] * len(trajectories)
    samples, episodes = batch.samples, batch.episodes
    sampled = samples.sampled & (samples.spans != Span.SHOWN)
    order = samples.token[sampled].argsort()
    columns = {
        "advantages": samples.advantages, "returns": samples.returns,
        "loss_mask": samples.loss_mask, "advantage_mask": samples.advantage_mask,
    }  # fmt: skip
    if values:
        columns["values"] = samples.values
    flat = {name: column[sampled][order].cpu().numpy() for name, column in columns.items()}
    of_token = samples.episode[:, None].expand_as(sampled)[sampled][order]
    sizes = torch.bincount(of_token, minlength=len(episodes.turns))
    lasts = sizes.cumsum(0).tolist()
    names = zip(episodes.group.tolist(), episodes.member.tolist(), strict=True)
    places = {
        name: slice(last - size, last)
        for name, last, size in zip(names, lasts, sizes.tolist(), strict=True)
    }
    return [
        TokenCredit(**{name: column[place] for name, column in flat.items()})
        if usable(one) and (place := places.get((one.group, one.member))) is not None
        else None
        for one in trajectories
    ]
