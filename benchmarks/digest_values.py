"""Values of trajectories, batches and weights, and their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from typing import Any

import numpy as np
import torch

from ragen_pl.data.batch import TrajectoryBatch
from ragen_pl.trajectory import Trajectory, Turn


def digest(values: Iterable[object]) -> str:
    """Return a hash of the values in order, each with its type and size."""
    sha = hashlib.sha256()
    for value in values:
        sha.update(_encoded(value))
    return sha.hexdigest()


def _pixels(images: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return images of one size as `[images, 3, height, width]`; empty `[0]` without images."""
    if not images:
        return torch.zeros(0)
    return torch.stack([image.permute(2, 0, 1) for image in images])


def _encoded(value: object) -> bytes:
    if isinstance(value, Enum):
        return _encoded(value.value)
    if value is None:
        return b"none;"
    if isinstance(value, bool | np.bool_):
        return b"true;" if value else b"false;"
    if isinstance(value, int | np.integer):
        return f"int {int(value)};".encode()
    if isinstance(value, float | np.floating):
        return f"float {float(value).hex()};".encode()
    if isinstance(value, str):
        return f"text {len(value)} {value};".encode()
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{value.dtype} {tuple(value.shape)} ".encode() + flat.numpy().tobytes() + b";"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} ".encode() + value.tobytes() + b";"
    if isinstance(value, list | tuple):
        return b"".join([f"list {len(value)} ".encode(), *map(_encoded, value)])
    raise TypeError(f"digest: {type(value).__name__} has no encoding here; hash its fields")


def rollout_digests(trajectories: Sequence[Trajectory]) -> dict[str, str]:
    """Return a digest of the trajectories, and one of their log-probs and entropies."""
    return {
        "trajectories": digest(chain.from_iterable(map(trajectory_values, trajectories))),
        "likelihoods": digest(chain.from_iterable(map(likelihoods, trajectories))),
    }


def trajectory_values(trajectory: Trajectory) -> Iterator[object]:
    """Yield the values of a trajectory and its turns, without log-probs."""
    yield from (trajectory.group, trajectory.member, trajectory.seed)
    yield trajectory.system_prompt_length
    yield from (trajectory.status, trajectory.success, trajectory.difficulty)
    yield from (trajectory.error, trajectory.reward)
    yield from (trajectory.final_prompt_ids, trajectory.final_images, trajectory.final_patches)
    yield len(trajectory.turns)
    for turn in trajectory.turns:
        yield from turn_values(turn)


def turn_values(turn: Turn) -> Iterator[object]:
    """Yield the prompt, the response and the rewards of a turn."""
    yield from (turn.observation.text, turn.observation.images)
    yield from (turn.prompt_ids, turn.prompt_images, turn.prompt_patches, turn.turns_left_out)
    yield from (turn.response_ids, turn.spans, turn.response_text, turn.think, turn.actions)
    yield from (
        turn.action_is_valid,
        turn.action_is_effective,
        turn.hit_length_limit,
        turn.temperature,
    )
    yield from (turn.reward, sorted(turn.reward_terms.values()))
    yield from (turn.state_description, turn.state_key)
    for statement in turn.statements:
        yield from (statement.block, statement.text, statement.agreement, statement.score)
        yield [value for relation in statement.true_relations for value in relation]


def likelihoods(trajectory: Trajectory) -> Iterator[object]:
    """Yield the log-probs and entropies of a trajectory."""
    for turn in trajectory.turns:
        yield from (turn.response_logprobs, turn.response_entropy)


def batch_values(batch: TrajectoryBatch) -> dict[str, list[object]]:
    """Return the values of a prepared batch, in groups that `compare` names."""
    samples, episodes = batch.samples, batch.episodes
    return {
        "inputs": [
            samples.input_ids,
            samples.length,
            samples.turn,
            samples.token,
            samples.spans,
            samples.temperature,
            samples.image_index,
            samples.patches,
            samples.episode,
            samples.weight,
            _pixels(batch.images),
        ],
        "behavior": [samples.old_logprobs],
        "masks": [samples.loss_mask, samples.loss_weight, samples.advantage_mask, samples.kl_mask],
        "advantages": [samples.advantages],
        "returns": [samples.returns],
        "values": [samples.values, episodes.bootstrap],
        "episodes": [
            episodes.turn_rewards,
            episodes.turns,
            episodes.group,
            episodes.member,
            episodes.hit_length_limit,
            episodes.weight,
            episodes.truncated,
        ],
        "reference": [batch.reference],
        "entropy": [batch.entropy],
    }


def weight_digests(state: Mapping[str, object]) -> dict[str, Any]:
    """Return a digest of each tensor, and one of all distinct tensors that does not depend on names."""
    digests = {
        name: digest([tensor])[:16]
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor)
    }
    return {"all": digest(sorted(set(digests.values()))), "tensors": digests}
