"""Recorded episodes and conversations as files hold them: reading, origin and weights. No model is needed."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypedDict

from ragen_pl.algorithms.record_weights import numbered, per_group, record_weights
from ragen_pl.base.foreign_files import check_plain, plain_json
from ragen_pl.base.records import FILE, checked_types, parse_record, read_lines
from ragen_pl.base.seeding import derive_seed
from ragen_pl.data.settings import RecordSettings
from ragen_pl.data.validation import HELD_OUT, initial_state_seed
from ragen_pl.trajectory import MAX_REWARD, EpisodeStatus, Span

log = logging.getLogger(__name__)

RECORDS = "warm_start.records"
"""Key of their settings."""
_NEEDED = (
    "observation", "response", "response_ids", "spans", "reward", "valid", "effective", "hit_length_limit", "actions",
)  # fmt: skip
_MAX_SPAN, _MAX_ID = int(Span.PREDICTION), 1 << 31


class _Message(TypedDict):
    role: str
    content: str | list[dict[str, Any]]


# `return` is a word of Python
_Line = TypedDict(
    "_Line",
    {
        "messages": list[_Message],
        "images": NotRequired[list[str]],
        "success": NotRequired[bool],
        "return": NotRequired[float],
        "group": NotRequired[int | str],
    },
)


@dataclass(kw_only=True, slots=True)
class RecordedTurn:
    """A turn of a record, or a user's and an assistant's message. What a conversation does not say is None.

    Attributes:
        text: Text of the observation; of a record as its prompt shows it.
        images: Paths of its images, relative to the file's folder.
        response: Text of the response.
        reward: Sum of the reward terms.
        valid: Whether the response had a valid action.
        effective: Whether its actions changed the environment.
        advances: As `Turn.advances`.
        trained: As `Turn.trained`.
        hit_length_limit: Whether the response was cut.
        actions: Names or texts of the actions carried out.
        prompt_ids: int64 `[prompt]`.
        prompt_images: Paths of the prompt's images.
        response_ids: int64 `[response]`.
        spans: int8 `[response]`.
    """

    text: str
    images: list[str]
    response: str
    reward: float = 0.0
    valid: bool = True
    effective: bool = True
    advances: bool = True
    trained: bool = True
    hit_length_limit: bool = False
    actions: list[str] = field(default_factory=list)
    prompt_ids: np.ndarray | None = None
    prompt_images: list[str] = field(default_factory=list)
    response_ids: np.ndarray | None = None
    spans: np.ndarray | None = None


@dataclass(kw_only=True, slots=True)
class RecordedEpisode:
    """An episode of a file.

    Attributes:
        place: File and line, for messages.
        folder: Folder that its images are in.
        digest: Hash of the line.
        turns: Its turns, one at least.
        group: Equal for episodes from the same initial state.
        success: Whether the task was solved; None where a conversation does not say so.
        has_return: Whether the rewards are known.
        seed: Seed of the reset; None for a conversation.
        validation_set: Name of the validation set that it was played in; None for none.
        system: System message of a conversation; None without one.
    """

    place: str
    folder: Path
    digest: str
    turns: list[RecordedTurn]
    group: int | str
    success: bool | None
    has_return: bool = True
    seed: int | None = None
    validation_set: str | None = None
    system: str | None = None

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards, the same in any order of them."""
        return math.fsum(turn.reward for turn in self.turns)


def read_episodes(settings: RecordSettings) -> list[RecordedEpisode]:
    """Return the episodes of all files, in the order of the paths, of the files' names and of the lines.

    Episodes that failed, or have no turn that is trained on, are left out.

    Raises:
        ValueError: A path is not there, a file is a link or no plain file, or a line is neither a record nor a
            conversation.
    """
    if not settings.paths:
        raise ValueError(
            f"{RECORDS}.path has no value; set it to the folder of a run, an evaluation or an iteration "
            "(RUN/trajectories/iteration_0000), or to a JSONL file of conversations"
        )
    episodes, failed = [], 0
    for path in settings.paths:
        for file in _files(path):
            for number, line in read_lines(file):
                episode = _episode(line, place=f"{file}, line {number}", folder=file.parent)
                failed += episode is None
                episodes += [] if episode is None else [episode]
    if not episodes:
        raise ValueError(
            f"{RECORDS}.path={settings.path}: has no episode to learn ({failed} failed or have no trained turn)"
        )
    if failed:
        log.info(
            "%s: %d episodes failed or have no trained turn, and are left out", RECORDS, failed
        )
    return episodes


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"{RECORDS}.path={path}: there is no such file or folder")
    if path.is_dir():
        # no link is followed
        found = [Path(folder) / FILE for folder, _, files in os.walk(path) if FILE in files]
        if not found:
            raise ValueError(f"{RECORDS}.path={path}: there is no {FILE} in it or below")
    else:
        found = [path]
    for file in found:
        check_plain(file)
    return sorted(found)


def _episode(line: str, *, place: str, folder: Path) -> RecordedEpisode | None:
    """Return the episode of a line, None if it failed or has no trained turn."""
    try:
        read = plain_json(line)
    except ValueError as error:
        raise ValueError(
            f"{place}: expected a record or a conversation in JSON, found {line[:60]!r}"
        ) from error
    if isinstance(read, Mapping) and "messages" in read:
        return _of_conversation(read, line, place=place, folder=folder)
    return _of_record(parse_record(line, place=place), line, place=place, folder=folder)


def _digest(line: str) -> str:
    return hashlib.sha256(line.strip().encode()).hexdigest()


def _of_record(
    record: Mapping[str, Any], line: str, *, place: str, folder: Path
) -> RecordedEpisode | None:
    if record["status"] == EpisodeStatus.FAILED or not any(
        turn.get("trained", True) for turn in record["turns"]
    ):
        return None
    if record.get("seat") is not None:
        # another seat may have moved before, so its first observation tells no reset
        raise ValueError(
            f"{place}: is an episode of one of several seats, which can't be learned from; give records of games "
            "against a scripted player, such as those of `ragen_pl.evaluate`"
        )
    turns = []
    for number, turn in enumerate(record["turns"], start=1):
        inner = f"{place}, turn {number}"
        missing = [name for name in _NEEDED if turn.get(name) is None]
        if missing:
            raise ValueError(f"{inner}: has no {missing[0]}")
        if turn.get("prompt_patches") or turn.get("turns_left_out"):
            raise ValueError(
                f"{inner}: its prompt leaves out parts (context.leave_out), and can't be made again; give other records"
            )
        ids, spans = _ids(turn["response_ids"], inner), np.array(turn["spans"])
        if len(ids) != len(spans) or not len(ids) or spans.min() < 0 or spans.max() > _MAX_SPAN:
            raise ValueError(f"{inner}: spans do not fit the {len(ids)} ids of its response")
        turns.append(
            RecordedTurn(
                text=turn["observation"],
                images=turn["images"],
                response=turn["response"],
                reward=_reward(turn["reward"], inner),
                valid=turn["valid"],
                effective=turn["effective"],
                advances=turn.get("advances", True),
                trained=turn.get("trained", True),
                hit_length_limit=turn["hit_length_limit"],
                actions=turn["actions"],
                prompt_ids=_ids(turn["prompt_ids"], inner),
                prompt_images=turn["prompt_images"],
                response_ids=ids,
                spans=spans.astype(np.int8),
            )
        )
    return RecordedEpisode(
        place=place,
        folder=folder,
        digest=_digest(line),
        turns=turns,
        group=record["seed"],
        success=record["success"],
        seed=record["seed"],
        validation_set=record.get("validation_set"),
    )


def _ids(numbers: Sequence[int], place: str) -> np.ndarray:
    if any(not 0 <= number < _MAX_ID for number in numbers):
        raise ValueError(f"{place}: has a token id below 0 or of {_MAX_ID} or more")
    return np.array(numbers, dtype=np.int64)


def _reward(value: float, place: str) -> float:
    if not abs(value) < MAX_REWARD:
        raise ValueError(
            f"{place}: has a reward of {value}, expected one between {-MAX_REWARD:g} and {MAX_REWARD:g}"
        )
    return float(value)


def _of_conversation(
    read: Mapping[str, Any], line: str, *, place: str, folder: Path
) -> RecordedEpisode:
    checked_types(_Line, read, place=place)
    messages = list(read["messages"])
    roles = [message["role"] for message in messages]
    system = messages.pop(0) if roles[:1] == ["system"] else None
    dialogue = [message["role"] for message in messages]
    if not dialogue or dialogue != ["user", "assistant"] * (len(dialogue) // 2):
        raise ValueError(
            f"{place}: found roles {roles}, expected user and assistant in turn, an assistant last, and at most one "
            "system message before them"
        )
    images = iter(read.get("images", []))
    turns = []
    for user, assistant in zip(messages[::2], messages[1::2], strict=True):
        text, shown = _parts(user["content"], images, place=place)
        response, others = _parts(assistant["content"], images, place=place)
        if others:
            raise ValueError(
                f"{place}: an assistant's message has an image, which no policy samples"
            )
        turns.append(RecordedTurn(text=text, images=shown, response=response))
    if (left := len(list(images))) > 0:
        raise ValueError(f"{place}: {left} of its images belong to no part of a message")
    turns[-1].reward = _reward(read.get("return", 0.0), place)
    return RecordedEpisode(
        place=place,
        folder=folder,
        digest=_digest(line),
        turns=turns,
        group=read.get("group", place),
        success=read.get("success"),
        has_return="return" in read,
        system=None if system is None else _parts(system["content"], images, place=place)[0],
    )


def _parts(
    content: str | Sequence[Mapping[str, Any]], images: Iterator[str], *, place: str
) -> tuple[str, list[str]]:
    """Return the text and the images of a message.

    An image is `{"type": "image", "image": path}`, or `{"type": "image"}` for the next of the line's `images`.
    """
    if isinstance(content, str):
        return content, []
    texts: list[str] = []
    paths: list[str] = []
    for part in content:
        kind = part.get("type")
        given = part.get(str(kind)) if kind in ("text", "image") else None
        if kind == "image" and given is None:
            given = next(images, None)
        if not isinstance(given, str):
            raise ValueError(
                f'{place}: found the part {str(part)[:80]}, expected {{"type": "text", "text": …}} or '
                '{"type": "image", "image": path}, or an image of the list "images"'
            )
        (texts if kind == "text" else paths).append(given)
    return "".join(texts), paths


def known_as_held_out(episodes: Sequence[RecordedEpisode], *, states: int) -> list[bool]:
    """Return which records are of the held-out validation set, by its name or by the seed of a reset.

    Args:
        episodes: Recorded episodes.
        states: Number of the run's own held-out initial states.
    """
    seeds = {initial_state_seed(HELD_OUT, number) for number in range(states)}
    return [one.validation_set == HELD_OUT or one.seed in seeds for one in episodes]


def without_held_out(
    episodes: Sequence[RecordedEpisode],
    held_out: Sequence[bool],
    settings: RecordSettings,
    *,
    found: str,
) -> list[RecordedEpisode]:
    """Return the episodes that are not held out.

    Args:
        episodes: Recorded episodes.
        held_out: Whether each one is.
        settings: Whether they are left out or refused.
        found: How they are known, for the message.

    Raises:
        ValueError: Some are, and they are refused; or all are.
    """
    count, left = (
        sum(held_out),
        [one for one, out in zip(episodes, held_out, strict=True) if not out],
    )
    first = next((one.place for one, out in zip(episodes, held_out, strict=True) if out), "")
    if count and (settings.held_out == "refuse" or not left):
        raise ValueError(
            f"{RECORDS}: {count} of {len(episodes)} episodes {found}, the first in {first}; training on them would "
            "spoil the validation; give other records (folders of iterations, or a validation set of another key), or "
            f"set {RECORDS}.held_out=skip to leave them out"
        )
    if count:
        log.info("%s: %d of %d episodes %s, and are left out", RECORDS, count, len(episodes), found)
    return left


def weights_of(
    episodes: Sequence[RecordedEpisode], settings: RecordSettings, *, seed: int
) -> dict[int, float]:
    """Return the weight of each episode by its index; those that are not drawn are missing.

    Args:
        episodes: Recorded episodes, all of the run.
        settings: Rule and number.
        seed: Seed of the run, which chooses them.

    Raises:
        ValueError: None has a weight, or one does not say what the rule needs.
    """
    silent = [one.place for one in episodes if one.success is None]
    if settings.rule == "success" and silent:
        raise ValueError(
            f'{RECORDS}.rule=success: {silent[0]} has no "success"; add it, or set {RECORDS}.rule=all'
        )
    silent = [one.place for one in episodes if not one.has_return]
    if settings.rule not in ("all", "success") and silent:
        raise ValueError(
            f'{RECORDS}.rule={settings.rule}: {silent[0]} has no "return"; add it, or set {RECORDS}.rule=all'
        )
    returns = torch.tensor([one.reward for one in episodes], dtype=torch.float64)
    group = numbered([one.group for one in episodes])
    weights = record_weights(
        returns,
        torch.tensor([bool(one.success) for one in episodes]),
        group,
        rule=settings.rule,
        threshold=settings.threshold,
        best=settings.best,
        temperature=settings.temperature,
        cap=settings.cap,
    )
    if settings.per_group:
        weights = per_group(weights, group)
    # the loss, which counts tokens, then keeps its scale
    weights = weights / weights[weights > 0].mean().nan_to_num(nan=1.0)
    learned = torch.tensor([any(learns(turn, settings) for turn in one.turns) for one in episodes])
    taken = torch.nonzero((weights > 0) & learned)[:, 0]
    if not len(taken):
        raise ValueError(
            f"{RECORDS}.rule={settings.rule}: none of {len(episodes)} episodes passes it with a turn of turns="
            f"{settings.turns}; the highest return is {float(returns.max()):.4g}, and "
            f"{sum(bool(one.success) for one in episodes)} are solved; give other records, or another rule"
        )
    dropped: set[int] = set()
    if settings.episodes is not None:
        generator = torch.Generator().manual_seed(derive_seed(seed, "records"))
        order: Tensor = taken[torch.randperm(len(taken), generator=generator)]
        dropped = set(order[settings.episodes :].tolist())
    return {n: weight for n, weight in enumerate(weights.tolist()) if n not in dropped}


def learns(turn: RecordedTurn, settings: RecordSettings) -> bool:
    """Return whether the policy learns a turn's response."""
    if not turn.trained:
        return False
    # a summary changes nothing, and is not meant to
    effective = settings.turns == "valid" or turn.effective or not turn.advances
    return settings.turns == "all" or (turn.valid and effective)
