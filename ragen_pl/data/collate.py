"""From trajectories to a TrajectoryBatch: which tokens share a sample, and what each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ragen_pl.data.batch import Episodes, Samples, TrajectoryBatch
from ragen_pl.trajectory import EpisodeStatus, Span, Trajectory, Turn

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle


@dataclass(slots=True)
class _Sample:
    """A sequence under construction: the ids of its last turn's prompt and response, and its turns."""

    episode: int
    ids: np.ndarray
    images: list[np.ndarray]
    patches: list[np.ndarray] | None = None
    responses: list[tuple[int, int, Turn]] = field(
        default_factory=list
    )  # (start, turn index, turn)


def split_into_samples(trajectory: Trajectory, episode: int) -> list[_Sample]:
    """Join turns whose prompt continues the ids before it; a break starts a new sample.

    Nothing is encoded here: a sample is what the engine was given and what it sampled, id for id.
    """
    samples: list[_Sample] = []
    for number, turn in enumerate(trajectory.turns):
        last = samples[-1] if samples else None
        known = 0 if last is None else len(last.ids)
        if (
            last is None
            or len(turn.prompt_ids) < known
            or not np.array_equal(turn.prompt_ids[:known], last.ids)
            or not _same_images(last, turn)
        ):
            last = _Sample(episode, turn.prompt_ids, [])
            samples.append(last)
        last.responses.append((len(turn.prompt_ids), number, turn))
        last.ids = np.concatenate([turn.prompt_ids, turn.response_ids])
        last.images, last.patches = turn.prompt_images, turn.prompt_patches
    return samples


def _same_images(sample: _Sample, turn: Turn) -> bool:
    """Return whether a turn shows the sample's images, patch for patch, before its own: ids don't tell."""
    count = len(sample.images)
    if count and (sample.patches is None) != (turn.prompt_patches is None):
        return False
    pairs = [*zip(sample.images, turn.prompt_images[:count], strict=False)]
    pairs += zip(sample.patches or [], (turn.prompt_patches or [])[:count], strict=False)
    return len(turn.prompt_images) >= count and all(
        one is other or np.array_equal(one, other) for one, other in pairs
    )


def usable(trajectory: Trajectory) -> bool:
    """Return whether a trajectory can be trained on: the credit of failed ones is unknown."""
    return bool(trajectory.turns) and trajectory.status is not EpisodeStatus.FAILED


def collate(
    trajectories: Sequence[Trajectory],
    bundle: ModelBundle,
    *,
    weights: Sequence[float] | None = None,
    observations: bool = False,
) -> TrajectoryBatch:
    """Build the batch of these trajectories, those that are not `usable` left out.

    Args:
        trajectories: to train on.
        bundle: the model's tokenizer and processor.
        weights: of the trajectories in the policy's loss; None for 1 each.
        observations: label the text between system prompt and responses too, as `Span.SHOWN` (RICO).
    """
    given = weights if weights is not None else [1.0] * len(trajectories)
    pairs = [pair for pair in zip(trajectories, given, strict=True) if usable(pair[0])]
    kept = [trajectory for trajectory, _ in pairs]
    parts = [
        sample
        for number, trajectory in enumerate(kept)
        for sample in split_into_samples(trajectory, number)
    ]
    image_store = _ImageStore()
    samples = _samples(
        parts, image_store, pad=bundle.pad_token_id, most=_most_patches(parts, bundle)
    )
    if observations:
        label_shown_text(
            samples, [one.system_prompt_length for one in kept], banned=bundle.banned_token_ids
        )
    final = [
        _Sample(
            number, trajectory.final_prompt_ids, trajectory.final_images, trajectory.final_patches
        )
        for number, trajectory in enumerate(kept)
        if trajectory.status is EpisodeStatus.TRUNCATED and trajectory.final_prompt_ids is not None
    ]
    final_samples = (
        _samples(final, image_store, pad=bundle.pad_token_id, most=_most_patches(final, bundle))
        if final
        else None
    )
    return TrajectoryBatch(
        samples=samples,
        episodes=_episodes(kept, [weight for _, weight in pairs]),
        pixel_values=bundle.pixel_values(image_store.arrays)
        if image_store.arrays
        else torch.zeros(0),
        final=final_samples,
    )


class _ImageStore:
    """Numbers images, the same array always alike."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._numbers: dict[int, int] = {}

    def number(self, image: np.ndarray) -> int:
        if id(image) not in self._numbers:
            self._numbers[id(image)] = len(self.arrays)
            self.arrays.append(image)
        return self._numbers[id(image)]


def _most_patches(parts: Sequence[_Sample], bundle: ModelBundle) -> int:
    """Return the patches of a whole image, 0 where no sample leaves any out."""
    return max(
        (
            bundle.num_image_tokens(image)
            for part in parts
            if part.patches is not None
            for image in part.images
        ),
        default=0,
    )


def _patches(parts: Sequence[_Sample], images: int, most: int) -> Tensor:
    """Mark the patches that samples show, `[rows, images, most]`."""
    shown = torch.zeros(len(parts), images if most else 0, most, dtype=torch.bool)
    for row, part in enumerate(parts):
        for number in range(len(part.images) if most else 0):
            if part.patches is None:
                shown[row, number] = True
            else:
                shown[row, number, torch.from_numpy(part.patches[number])] = True
    return shown


def _samples(parts: Sequence[_Sample], image_store: _ImageStore, *, pad: int, most: int) -> Samples:
    rows, time = len(parts), max((len(part.ids) for part in parts), default=0)
    most_images = max((len(part.images) for part in parts), default=0)
    ids = np.full((rows, time), pad, dtype=np.int64)
    images = np.full((rows, most_images), -1, dtype=np.int64)
    sampled = np.zeros((rows, time), dtype=bool)
    turn, token = (
        np.full((rows, time), -1, dtype=np.int64),
        np.full((rows, time), -1, dtype=np.int64),
    )
    spans = np.zeros((rows, time), dtype=np.int8)
    logprobs, temperature = (
        np.zeros((rows, time), dtype=np.float32),
        np.ones((rows, time), dtype=np.float32),
    )
    count = 0
    for row, part in enumerate(parts):
        ids[row, : len(part.ids)] = part.ids
        images[row, : len(part.images)] = [image_store.number(image) for image in part.images]
        for start, number, response in part.responses:
            place = slice(start, start + len(response.response_ids))
            sampled[row, place], turn[row, place] = True, number
            token[row, place] = np.arange(count, count + len(response.response_ids))
            spans[row, place], temperature[row, place] = response.spans, response.temperature
            logprobs[row, place] = response.response_logprobs
            count += len(response.response_ids)
    zeros = torch.zeros(rows, time)
    mask = torch.from_numpy(sampled)
    return Samples(
        input_ids=torch.from_numpy(ids),
        length=torch.tensor([len(part.ids) for part in parts], dtype=torch.int64),
        loss_mask=mask,
        loss_weight=mask.float(),
        advantage_mask=mask.clone(),
        kl_mask=mask.clone(),
        turn=torch.from_numpy(turn),
        token=torch.from_numpy(token),
        spans=torch.from_numpy(spans),
        behavior_logprobs=torch.from_numpy(logprobs),
        temperature=torch.from_numpy(temperature),
        image_index=torch.from_numpy(images),
        patches=_patches(parts, most_images, most),
        episode=torch.tensor([part.episode for part in parts], dtype=torch.int64),
        weight=torch.ones(rows),
        advantages=zeros,
        returns=zeros.clone(),
        values=zeros.clone(),
    )


def label_shown_text(samples: Samples, heads: Sequence[int], *, banned: Sequence[int]) -> None:
    """Make the text that a policy was shown part of the turn whose response follows it, and number all anew.

    Left out are the system prompt and tokens that the policy can't give, such as those of images.

    Args:
        samples: a row is a whole episode; changed in place.
        heads: length of each episode's system prompt.
        banned: tokens of probability 0.

    Raises:
        ValueError: an episode has several samples.
    """
    if len(torch.unique(samples.episode)) < len(samples):
        raise ValueError(
            "an episode is spread over several samples, and masks over all text need it undivided; set "
            "context.window=all and a chat template that keeps its history as it was"
        )
    place = torch.arange(samples.input_ids.shape[1])[None, :]
    after_head = place >= torch.tensor(heads, dtype=torch.int64)[samples.episode][:, None].clamp(
        min=1
    )
    allowed = ~torch.isin(samples.input_ids, torch.tensor(list(banned), dtype=torch.int64))
    shown = after_head & (place < samples.length[:, None]) & (samples.turn < 0) & allowed
    # Read from the right, the turn that follows is the least turn met so far.
    later = torch.where(samples.turn >= 0, samples.turn, samples.turn.max() + 1).flip(1)
    turn = torch.where(shown, later.cummin(1).values.flip(1), samples.turn)
    samples.spans[shown], samples.turn = int(Span.SHOWN), turn
    on = turn >= 0
    samples.token = torch.where(on, on.flatten().cumsum(0).view_as(on) - 1, -1)


def as_dummy_batch(batch: TrajectoryBatch) -> TrajectoryBatch:
    """Return a batch that takes a rank through its steps and counts nowhere: no episode, rows of weight 0."""
    batch.samples.weight.zero_()
    none = torch.zeros(0, dtype=torch.int64)
    columns = fields(batch.episodes)
    batch.episodes = Episodes(
        **{field.name: getattr(batch.episodes, field.name)[none] for field in columns}
    )
    batch.final = None
    return batch


def _episodes(kept: Sequence[Trajectory], weights: Sequence[float]) -> Episodes:
    most = max((len(trajectory.turns) for trajectory in kept), default=0)
    rewards, cut = torch.zeros(len(kept), most), torch.zeros(len(kept), most, dtype=torch.bool)
    for row, trajectory in enumerate(kept):
        turns = trajectory.turns
        rewards[row, : len(turns)] = torch.tensor([turn.reward for turn in turns])
        cut[row, : len(turns)] = torch.tensor([turn.hit_length_limit for turn in turns])

    def column(values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    return Episodes(
        turn_rewards=rewards,
        turns=column([len(trajectory.turns) for trajectory in kept], torch.int64),
        group=column([trajectory.group for trajectory in kept], torch.int64),
        member=column([trajectory.member for trajectory in kept], torch.int64),
        hit_length_limit=cut,
        state=_states(kept, most),
        weight=torch.tensor(weights, dtype=torch.float32),
        truncated=column(
            [trajectory.status is EpisodeStatus.TRUNCATED for trajectory in kept], torch.bool
        ),
        bootstrap=torch.zeros(len(kept)),
    )


def _states(kept: Sequence[Trajectory], most: int) -> Tensor:
    """Number the states that the turns began in, the same state always alike; -1 where it was not recorded."""
    numbers: dict[str, int] = {}
    state = torch.full((len(kept), most), -1, dtype=torch.int64)
    for row, trajectory in enumerate(kept):
        for number, turn in enumerate(trajectory.turns):
            key = turn.state_key
            if key is not None:
                state[row, number] = numbers.setdefault(key, len(numbers))
    return state
