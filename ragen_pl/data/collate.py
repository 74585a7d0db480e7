"""From trajectories to a TrajectoryBatch: the sample, turn and span of each token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ragen_pl.data.batch import Episodes, Samples, TrajectoryBatch
from ragen_pl.models.images import content_key
from ragen_pl.models.truncation import KeptIds
from ragen_pl.trajectory import EpisodeStatus, Role, Span, Trajectory, Turn

if TYPE_CHECKING:
    from ragen_pl.models.bundle import ModelBundle


@dataclass(slots=True)
class _Draft:
    """A sample under construction: ids and images of its last turn, and the responses of its turns."""

    episode: int
    ids: np.ndarray
    images: list[np.ndarray]
    patches: list[np.ndarray] | None = None
    responses: list[_Response] = field(default_factory=list)
    final_roles: np.ndarray | None = None


class _Response(NamedTuple):
    start: int
    turn_index: int
    turn: Turn


def split_into_samples(
    trajectory: Trajectory, episode: int, *, hinted: bool = False
) -> list[_Draft]:
    """Divide the trained turns among samples: one whose prompt continues a sample is appended to it.

    Among several samples a turn continues the longest, among equal ones the latest. A turn that continues none, or one
    that has gone on another way since, starts a new sample. So each response is trained on once, in the sample that it
    was sampled in, and is context in others. Untrained responses are context where prompts contain them. Nothing is
    encoded here: a sample holds the ids that the engine was given and sampled.

    Args:
        trajectory: The episode.
        episode: Its number.
        hinted: Whether prompts are those of a teacher that reads hints.
    """
    drafts: list[_Draft] = []
    for number, turn in enumerate(trained_turns(trajectory)):
        ids, images, patches = turn.prompt_ids, turn.prompt_images, turn.prompt_patches
        if hinted and turn.teacher_prompt_ids is not None:
            ids, images, patches = turn.teacher_prompt_ids, turn.teacher_images or [], None
        draft = _longest_continued(reversed(drafts), ids, images, patches)
        if draft is None:
            draft = _Draft(episode, ids, [])
            drafts.append(draft)
        draft.responses.append(_Response(len(ids), number, turn))
        draft.ids = np.concatenate([ids, turn.response_ids])
        draft.images, draft.patches = images, patches
    return drafts


def _longest_continued(
    drafts: Iterable[_Draft],
    ids: np.ndarray,
    images: list[np.ndarray],
    patches: list[np.ndarray] | None,
) -> _Draft | None:
    """Return the longest draft that a prompt continues, the first of several; None without any."""
    continued = [draft for draft in drafts if _continues(ids, images, patches, draft)]
    return max(continued, key=lambda draft: len(draft.ids), default=None)


def _continues(
    ids: np.ndarray, images: list[np.ndarray], patches: list[np.ndarray] | None, draft: _Draft
) -> bool:
    """Return whether the ids, images and patches of a prompt begin with those of the draft."""
    length, count = len(draft.ids), len(draft.images)
    if len(ids) < length or not np.array_equal(ids[:length], draft.ids):
        return False
    if count and (draft.patches is None) != (patches is None):
        return False
    pairs = [*zip(draft.images, images[:count], strict=False)]
    pairs += zip(draft.patches or [], (patches or [])[:count], strict=False)
    return len(images) >= count and all(
        first is second or np.array_equal(first, second) for first, second in pairs
    )


def trained_turns(trajectory: Trajectory) -> list[Turn]:
    """Return the turns that the policy is trained on, which samples and credit number from 0."""
    return [turn for turn in trajectory.turns if turn.trained]


def usable(trajectory: Trajectory) -> bool:
    """Return whether a trajectory can be trained on: it has a trained turn and, not being failed, known credit."""
    return bool(trained_turns(trajectory)) and trajectory.status is not EpisodeStatus.FAILED


def collate(
    trajectories: Sequence[Trajectory],
    bundle: ModelBundle,
    *,
    weights: Sequence[float] | None = None,
    observations: bool = False,
    text: bool = False,
    shares: Mapping[str, float] | None = None,
    hinted: bool = False,
) -> TrajectoryBatch:
    """Build the batch of the `usable` trajectories.

    Args:
        trajectories: Trajectories to train on.
        bundle: Model with tokenizer and processor.
        weights: Factors of the trajectories in the policy's loss; None for 1 each.
        observations: Label the text between system prompt and responses too, as `Span.SHOWN` (RICO).
        text: Label the environment's text that follows a response, in `Samples.text` (ECHO).
        shares: Share of each environment of a mixture, by name; None where there is one environment.
        hinted: Add the samples of a teacher that reads hints.

    Raises:
        ValueError: With `observations`, an episode has several samples or an untrained turn; with `text`, the roles of
            a prompt are not recorded.
    """
    all_weights = weights if weights is not None else [1.0] * len(trajectories)
    pairs = [pair for pair in zip(trajectories, all_weights, strict=True) if usable(pair[0])]
    kept = [trajectory for trajectory, _ in pairs]

    def split(*, hinted: bool = False) -> list[_Draft]:
        parts = (split_into_samples(one, number, hinted=hinted) for number, one in enumerate(kept))
        return [draft for part in parts for draft in part]

    drafts = split()
    if text:
        _show_final_text(drafts, kept)
    # members of a group share their first image, and more while they do the same
    groups = {trajectory.group for trajectory in kept}
    images = _ImageStore(by_content=len(groups) < len(kept))
    samples, sampled_from = _samples(drafts, images, bundle), _kept_ids(drafts)
    if text:
        label_text(samples, drafts, allowed=bundle.can_sample(samples.input_ids))
    if observations:
        _require_all_trained(kept)
        heads, numbers = [trajectory.system_prompt_length for trajectory in kept], samples.token
        label_shown_text(samples, heads, allowed=bundle.can_sample(samples.input_ids))
        if sampled_from is not None:
            sampled_from = _renumbered(sampled_from, numbers, samples.token)
    final = [
        _Draft(
            number, trajectory.final_prompt_ids, trajectory.final_images, trajectory.final_patches
        )
        for number, trajectory in enumerate(kept)
        if trajectory.status is EpisodeStatus.TRUNCATED and trajectory.final_prompt_ids is not None
    ]
    final_samples = _samples(final, images, bundle) if final else None
    hinted_samples = _samples(split(hinted=True), images, bundle) if hinted else None
    terms = sorted(
        {name for trajectory in kept for turn in trajectory.turns for name in turn.reward_terms}
    )
    return TrajectoryBatch(
        samples=samples,
        episodes=_episodes(kept, [weight for _, weight in pairs], terms, [*(shares or {})]),
        images=images.tensors(),
        final=final_samples,
        hinted=hinted_samples,
        kept_ids=sampled_from,
        terms=tuple(terms),
        shares=dict(shares or {}),
        has_values=all(
            turn.response_values is not None for draft in drafts for _, _, turn in draft.responses
        ),
    )


def _kept_ids(drafts: Sequence[_Draft]) -> KeptIds | None:
    """Return the ids that sampling kept, by the numbers of `_first_tokens`; None where no response has them."""
    turns = {
        (draft.episode, number): turn for draft in drafts for _, number, turn in draft.responses
    }
    if all(turn.kept_ids is None for turn in turns.values()):
        return None
    ids, counts = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    for _, turn in sorted(turns.items(), key=lambda pair: pair[0]):
        if turn.kept_ids is None or turn.kept_counts is None:
            counts.append(np.zeros(len(turn.response_ids), np.int32))
        else:
            ids.append(turn.kept_ids)
            counts.append(turn.kept_counts)
    ends = torch.from_numpy(np.concatenate(counts).cumsum(dtype=np.int64))
    return KeptIds(torch.from_numpy(np.concatenate(ids)), ends)


def _renumbered(kept: KeptIds, old: Tensor, new: Tensor) -> KeptIds:
    """Return kept ids by new numbers of their tokens, `[rows, time]`; new tokens keep all ids."""
    every = KeptIds.join([kept, KeptIds.all_of(1, device=kept.ids.device)])
    index = torch.full((int(new.max()) + 1,), len(kept), dtype=torch.int64)
    index[new[old >= 0]] = old[old >= 0]
    return every.select(index)


class _ImageStore:
    """Numbers of images; the same array always has the same number.

    Args:
        by_content: Whether all arrays of equal content have the same number.
    """

    def __init__(self, *, by_content: bool) -> None:
        self._arrays: list[np.ndarray] = []
        self._numbers: dict[int, int] = {}
        self._by_content: dict[bytes, int] | None = {} if by_content else None

    def number(self, image: np.ndarray) -> int:
        if id(image) not in self._numbers:
            number = len(self._arrays)
            if self._by_content is not None:
                number = self._by_content.setdefault(content_key(image), number)
            if number == len(self._arrays):
                self._arrays.append(image)
            self._numbers[id(image)] = number
        return self._numbers[id(image)]

    def tensors(self) -> list[Tensor]:
        """Return the images, each uint8 `[height, width, 3]`."""
        return [torch.from_numpy(array) for array in self._arrays]


def _patches(drafts: Sequence[_Draft], images: int, bundle: ModelBundle) -> Tensor:
    """Mark the patches that samples show, bool `[rows, images, patches]`; `[rows, 0, 0]` if all are shown."""
    partial = [draft for draft in drafts if draft.patches is not None]
    counts = [bundle.num_image_tokens(image) for draft in partial for image in draft.images]
    patches = max(counts, default=0)
    shown = torch.zeros(len(drafts), images if patches else 0, patches, dtype=torch.bool)
    for row, draft in enumerate(drafts if patches else ()):
        for number in range(len(draft.images)):
            if draft.patches is None:
                shown[row, number] = True
            else:
                shown[row, number, torch.from_numpy(draft.patches[number])] = True
    return shown


def _samples(drafts: Sequence[_Draft], images: _ImageStore, bundle: ModelBundle) -> Samples:
    rows, time = len(drafts), max((len(draft.ids) for draft in drafts), default=0)
    max_images = max((len(draft.images) for draft in drafts), default=0)
    shape, minus_one = (rows, time), np.full((rows, time), -1, dtype=np.int64)
    ids = np.full(shape, bundle.pad_token_id, dtype=np.int64)
    image_index = np.full((rows, max_images), -1, dtype=np.int64)
    turn, token = minus_one.copy(), minus_one.copy()
    spans = np.zeros(shape, dtype=np.int8)
    logprobs, temperature = np.zeros(shape, dtype=np.float32), np.ones(shape, dtype=np.float32)
    values = np.zeros(shape, dtype=np.float32)
    firsts = _first_tokens(drafts)
    for row, draft in enumerate(drafts):
        ids[row, : len(draft.ids)] = draft.ids
        image_index[row, : len(draft.images)] = [images.number(image) for image in draft.images]
        for start, number, response in draft.responses:
            length = len(response.response_ids)
            place = slice(start, start + length)
            first = firsts[draft.episode, number]
            turn[row, place], token[row, place] = number, np.arange(first, first + length)
            spans[row, place], temperature[row, place] = response.spans, response.temperature
            logprobs[row, place] = response.response_logprobs
            if response.response_values is not None:
                values[row, place] = response.response_values
    zeros = torch.zeros(shape)
    sampled = torch.from_numpy(turn >= 0)
    return Samples(
        input_ids=torch.from_numpy(ids),
        length=torch.tensor([len(draft.ids) for draft in drafts], dtype=torch.int64),
        loss_mask=sampled,
        loss_weight=sampled.float(),
        advantage_mask=sampled.clone(),
        kl_mask=sampled.clone(),
        turn=torch.from_numpy(turn),
        token=torch.from_numpy(token),
        spans=torch.from_numpy(spans),
        text=torch.zeros(shape, dtype=torch.int8),
        rollout_logprobs=torch.from_numpy(logprobs),
        old_logprobs=torch.from_numpy(logprobs.copy()),
        temperature=torch.from_numpy(temperature),
        image_index=torch.from_numpy(image_index),
        patches=_patches(drafts, max_images, bundle),
        episode=torch.tensor([draft.episode for draft in drafts], dtype=torch.int64),
        weight=torch.ones(rows),
        advantages=zeros,
        returns=zeros.clone(),
        values=torch.from_numpy(values),
    )


def _first_tokens(drafts: Sequence[_Draft]) -> dict[tuple[int, int], int]:
    """Return the number of each response's first token, by episode and turn, the order that tokens are numbered in."""
    lengths = {
        (draft.episode, number): len(turn.response_ids)
        for draft in drafts
        for _, number, turn in draft.responses
    }
    firsts, count = {}, 0
    for key in sorted(lengths):
        firsts[key] = count
        count += lengths[key]
    return firsts


def _require_all_trained(trajectories: Sequence[Trajectory]) -> None:
    if any(not turn.trained for trajectory in trajectories for turn in trajectory.turns):
        raise ValueError(
            "an episode has a response that is not trained on, and masks over all text would train on it as shown "
            "text; set algorithm.masks.observations=false"
        )


def label_shown_text(samples: Samples, heads: Sequence[int], *, allowed: Tensor) -> None:
    """Label shown text as part of the turn whose response follows it, and number all tokens anew.

    The system prompt, text after the last response, and tokens that the policy cannot sample, such as those of images,
    are left out.

    Args:
        samples: Samples that hold a whole episode each; changed in place.
        heads: Length of each episode's system prompt.
        allowed: Bool `[rows, time]`, tokens of a probability above 0.

    Raises:
        ValueError: An episode has several samples.
    """
    if len(torch.unique(samples.episode)) < len(samples):
        raise ValueError(
            "an episode is spread over several samples, and masks over all text need it undivided; set "
            "context.window=all and a chat template that keeps its history as it was"
        )
    place = torch.arange(samples.input_ids.shape[1])[None, :]
    lengths = torch.tensor(heads, dtype=torch.int64)[samples.episode][:, None]
    after_head = place >= lengths.clamp(min=1)
    shown = after_head & (place < samples.length[:, None]) & (samples.turn < 0) & allowed
    # Read from the right, the turn that follows is the smallest turn index so far.
    none = samples.turn.max() + 1
    later = torch.where(samples.turn >= 0, samples.turn, none).flip(1).cummin(1).values.flip(1)
    shown &= later < none
    turn = torch.where(shown, later, samples.turn)
    samples.spans[shown], samples.turn = int(Span.SHOWN), turn
    labelled = turn >= 0
    numbers = labelled.flatten().cumsum(0).view_as(labelled) - 1
    samples.token = torch.where(labelled, numbers, -1)


def _show_final_text(drafts: Sequence[_Draft], kept: Sequence[Trajectory]) -> None:
    """Append the last prompt of each truncated episode to its longest sample that it continues."""
    of_episode: dict[int, list[_Draft]] = {}
    for draft in drafts:
        of_episode.setdefault(draft.episode, []).append(draft)
    for number, trajectory in enumerate(kept):
        ids, roles = trajectory.final_prompt_ids, trajectory.final_roles
        if trajectory.status is not EpisodeStatus.TRUNCATED or ids is None or roles is None:
            continue
        shown = ids, trajectory.final_images, trajectory.final_patches
        longest = _longest_continued(of_episode.get(number, ()), *shown)
        if longest is not None:
            longest.ids, longest.images, longest.patches = shown
            longest.final_roles = roles


def label_text(samples: Samples, drafts: Sequence[_Draft], *, allowed: Tensor) -> None:
    """Label the environment's text that follows a response, each token once an episode.

    Args:
        samples: Samples of the drafts; changed in place.
        drafts: Samples under construction.
        allowed: Bool `[rows, time]`, tokens of a probability above 0, which those of images have not.

    Raises:
        ValueError: The roles of a prompt are not recorded.
    """
    place = torch.arange(samples.input_ids.shape[1])
    role = torch.where(place < samples.length[:, None], Role.TEMPLATE, Role.PADDING).to(torch.int8)
    number = torch.full(role.shape, -1, dtype=torch.int64)
    for row, draft in enumerate(drafts):
        shown = [(start, turn.prompt_roles) for start, _, turn in draft.responses]
        if draft.final_roles is not None:
            shown.append((len(draft.ids), draft.final_roles))
        for end, roles in shown:
            if roles is None:
                raise ValueError(
                    "algorithm.loss.echo: a prompt does not say which of its tokens are the environment's, as those of "
                    "agent programs; set algorithm.loss.echo=null"
                )
            role[row, end - len(roles) : end] = torch.from_numpy(roles)
        # in an episode each block is shown last by one prompt only
        own = role[row] > 0
        number[row, own] = row * len(place) + place[own]
    role[samples.turn >= 0] = int(Role.SAMPLED)
    from ragen_pl.algorithms.echo import following_text

    follows = following_text(role, number, samples.episode) & allowed
    samples.text = torch.where(follows, role, 0).to(torch.int8)


def as_dummy_batch(batch: TrajectoryBatch) -> TrajectoryBatch:
    """Turn a batch into a dummy batch: padding rows and no episode, for a rank without groups of its own.

    With it, all ranks take the same number of steps.
    """
    batch.samples.weight.zero_()
    batch.episodes = batch.episodes.select(torch.zeros(0, dtype=torch.int64))
    batch.final = None
    return batch


def _episodes(
    kept: Sequence[Trajectory],
    weights: Sequence[float],
    terms: Sequence[str],
    environments: Sequence[str],
) -> Episodes:
    turns_of = [trained_turns(trajectory) for trajectory in kept]
    max_turns = max(map(len, turns_of), default=0)
    rewards = torch.zeros(len(kept), max_turns)
    hit_length_limit = torch.zeros(len(kept), max_turns, dtype=torch.bool)
    advances = torch.ones(len(kept), max_turns, dtype=torch.bool)
    potential = torch.full((len(kept), max_turns), -torch.inf)
    for row, turns in enumerate(turns_of):
        rewards[row, : len(turns)] = torch.tensor(_rewards(kept[row]))
        limits = [turn.hit_length_limit for turn in turns]
        hit_length_limit[row, : len(turns)] = torch.tensor(limits)
        advances[row, : len(turns)] = torch.tensor([turn.is_task_step for turn in turns])
        potential[row, : len(turns)] = torch.tensor([_or_unknown(turn.potential) for turn in turns])

    keys = [key for turns in turns_of for key in _state_keys(turns, max_turns)]
    state = _numbers([*keys, *(trajectory.final_state_key for trajectory in kept)])
    return Episodes(
        turn_rewards=rewards,
        turns=torch.tensor([len(turns) for turns in turns_of], dtype=torch.int64),
        group=torch.tensor([trajectory.group for trajectory in kept], dtype=torch.int64),
        member=torch.tensor([trajectory.member for trajectory in kept], dtype=torch.int64),
        hit_length_limit=hit_length_limit,
        state=state[: len(kept) * max_turns].view(len(kept), max_turns),
        final_state=state[len(kept) * max_turns :],
        potential=potential,
        final_potential=torch.tensor(
            [_or_unknown(trajectory.final_potential) for trajectory in kept], dtype=torch.float32
        ),
        advances=advances,
        success=torch.tensor([_success(trajectory) for trajectory in kept], dtype=torch.int8),
        terms=torch.tensor(
            [_sums_of_terms(trajectory, terms) for trajectory in kept], dtype=torch.float64
        ).reshape(len(kept), len(terms)),
        environment=torch.tensor(
            [environments.index(one.environment or "") if environments else 0 for one in kept],
            dtype=torch.int64,
        ),
        weight=torch.tensor(weights, dtype=torch.float32),
        truncated=torch.tensor(
            [trajectory.status is EpisodeStatus.TRUNCATED for trajectory in kept], dtype=torch.bool
        ),
        bootstrap=torch.zeros(len(kept)),
    )


def _rewards(trajectory: Trajectory) -> list[float]:
    """Return the rewards of the trained turns; others' go to the trained turn before, else to the first."""
    rewards: list[float] = []
    before = 0.0
    for turn in trajectory.turns:
        if turn.trained:
            rewards.append(turn.reward)
        elif rewards:
            rewards[-1] += turn.reward
        else:
            before += turn.reward
    return [rewards[0] + before, *rewards[1:]]


def _success(trajectory: Trajectory) -> int:
    """Return 1 where the task was solved, 0 where not, -1 and -2 as `AdvantageInputs.success`."""
    if trajectory.says_success or trajectory.success:
        return int(trajectory.success)
    return -1 if trajectory.is_silent else -2


def _sums_of_terms(trajectory: Trajectory, names: Sequence[str]) -> list[float]:
    """Return the sum of each reward term over all turns, the same in any order of them; 0 where it is not set."""
    return [
        math.fsum(turn.reward_terms.get(name, 0.0) for turn in trajectory.turns) for name in names
    ]


def _or_unknown(potential: float | None) -> float:
    """Return a potential, -inf where it is not recorded."""
    return -math.inf if potential is None else potential


def _state_keys(turns: Sequence[Turn], max_turns: int) -> list[str | None]:
    """Return the key of the state that each turn started in, None where it is unknown and beyond the last turn."""
    return [turn.state_key for turn in turns] + [None] * (max_turns - len(turns))


def _numbers(keys: Sequence[str | None]) -> Tensor:
    """Number keys in the order of their first occurrence; None is -1. The result is int64 `[keys]`."""
    numbers: dict[str | None, int] = {None: -1}
    return torch.tensor(
        [numbers.setdefault(key, len(numbers) - 1) for key in keys], dtype=torch.int64
    )
