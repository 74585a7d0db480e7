"""Scoring each of some episodes' first reasoning under the first prompt of every other: what the probes read.

Nothing is sampled here, so that a run with probes is, weight for weight, the run without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor

from ragen_pl.data.collate import collate
from ragen_pl.distributed import gather_over_ranks
from ragen_pl.modules.forward import decoder_parts
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.trajectory import EpisodeStatus, Observation, Span, Trajectory, Turn

_THOUGHTS = (Span.THINK, Span.OBSERVATION, Span.PREDICTION)


@dataclass(slots=True)
class FirstThought:
    """The first turn's prompt and the response's tokens up to the end of its reasoning."""

    group: int
    prompt_ids: np.ndarray  # int64 [prompt]
    images: list[np.ndarray]
    ids: np.ndarray  # int64 [reasoning]: sampled ids, the opening tag included
    temperature: float
    patches: list[np.ndarray] | None = None  # that each image shows; None for all


def first_thoughts(trajectories: Sequence[Trajectory], *, count: int) -> list[FirstThought]:
    """Return up to `count` first thoughts under different prompts, the same on every rank and number of ranks.

    They are spread evenly over the groups of all ranks; a group counts once, by its first member that thinks.
    All ranks must call this together.
    """
    mine: dict[int, FirstThought] = {}
    for trajectory in trajectories:
        found = _first_thought(trajectory)
        if found is not None and found.group not in mine:
            mine[found.group] = found
    every = [one for rank in gather_over_ranks(list(mine.values())) for one in rank]
    distinct: dict[bytes, FirstThought] = {}
    for one in sorted(every, key=lambda one: one.group):
        seen = one.prompt_ids.tobytes() + b"".join(image.tobytes() for image in one.images)
        distinct.setdefault(seen, one)
    kept, count = list(distinct.values()), min(count, len(distinct))
    return [kept[index * len(kept) // count] for index in range(count)]


@torch.no_grad()
def cross_score(
    policy: PolicyModule, thoughts: Sequence[FirstThought], *, tokens_per_forward: int = 16_384
) -> tuple[Tensor, Tensor]:
    """Return log p(thought i | prompt j), float64 `[N, N]`, and the thoughts' lengths, int64 `[N]`.

    The policy must be in eval mode; its distribution is the one sampled from, at the thought's temperature.
    """
    pairs = [_pair(thought, prompt) for thought in thoughts for prompt in thoughts]
    batch = collate(pairs, policy.bundle)
    batch = move_data_to_device(batch, next(policy.parameters()).device)
    parts = decoder_parts(batch.samples.length, tokens_per_forward)
    scored = policy.score(batch.samples, batch.pixel_values, parts=parts)
    values = scored.logprobs.double().sum(1).cpu().view(len(thoughts), len(thoughts))
    return values, torch.tensor([len(thought.ids) for thought in thoughts])


def _first_thought(trajectory: Trajectory) -> FirstThought | None:
    if not trajectory.turns:
        return None
    turn = trajectory.turns[0]
    places = np.flatnonzero(np.isin(turn.spans, _THOUGHTS))
    if turn.think is None or not len(places):
        return None
    ids = turn.response_ids[: places[-1] + 1]
    return FirstThought(
        trajectory.group,
        turn.prompt_ids,
        list(turn.prompt_images),
        ids,
        turn.temperature,
        turn.prompt_patches,
    )


def _pair(thought: FirstThought, prompt: FirstThought) -> Trajectory:
    """Return the episode in which `thought` would have been the response to `prompt`."""
    count = len(thought.ids)
    turn = Turn(
        observation=Observation(text=""), prompt_ids=prompt.prompt_ids, prompt_images=prompt.images,
        response_ids=thought.ids, response_logprobs=np.zeros(count, np.float32), response_entropy=0.0,
        spans=np.full(count, Span.THINK, np.int8), response_text="", think="", actions=[],
        action_is_valid=True, action_is_effective=True, hit_length_limit=False, reward=0.0,
        temperature=thought.temperature, prompt_patches=prompt.patches,
    )  # fmt: skip
    return Trajectory(
        group=0, member=0, seed=0, turns=[turn], status=EpisodeStatus.TERMINATED, success=False
    )
