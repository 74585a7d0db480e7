"""An episode as one line of JSON, its images as PNG files: what pages, replays and notebooks read.

The schema is told in `docs/evaluation.md`. Nothing here knows of tables or checkpoints; credit per token
is taken out of a batch in `ragen_pl.viewing.token_credit`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from ragen_pl.files import atomic_write
from ragen_pl.trajectory import Trajectory, Turn

SCHEMA = 1
FILE = "trajectories.jsonl"
PICTURES = "images"
_IMAGE = "<image>"


class TokenReader(Protocol):
    """What turns ids into text; a `ContextManager` does."""

    @property
    def bundle(self) -> Any:
        """The model bundle, for its tokenizer and image token."""

    def pieces(self, ids: np.ndarray) -> list[str]:
        """Return the text of each token of a response."""


@dataclass(kw_only=True, slots=True)
class TokenCredit:
    """What an update knows of an episode's sampled tokens, in order; None where it does not."""

    values: np.ndarray | None = None  # float32 [tokens]: of the critic, before the update
    advantages: np.ndarray | None = None  # float32 [tokens]
    returns: np.ndarray | None = None  # float32 [tokens]: value targets
    loss_mask: np.ndarray | None = None  # bool [tokens]: M_loss
    advantage_mask: np.ndarray | None = None  # bool [tokens]: M_adv

    def of(self, place: slice) -> dict[str, list[float] | list[bool]]:
        """Return what is known of some of the tokens, in JSON's types."""
        return {
            name: column[place].tolist()
            for name, column in asdict(self).items()
            if column is not None
        }


@dataclass(kw_only=True, slots=True)
class Origin:
    """Where an episode was played: in a training iteration, or on a validation set by some player."""

    iteration: int | None = None
    validation_set: str | None = None
    policy: str = "policy"


class ImageFiles:
    """Writes each image once, under the digest of its pixels.

    Args:
        folder: where records are written; the files go to `images/` in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[str, str] = {}

    def name(self, image: np.ndarray) -> str:
        """Return the path of an image's file relative to the folder; write it if it is new.

        Args:
            image: uint8 `[height, width, 3]`.
        """
        pixels = np.ascontiguousarray(image)
        digest = hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).hexdigest()[:16]
        if digest not in self._known:
            name = f"{PICTURES}/{digest}.png"
            file = self.folder / name
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(file)
            self._known[digest] = name
        return self._known[digest]


def to_record(
    trajectory: Trajectory,
    *,
    reader: TokenReader | None = None,
    images: ImageFiles | None = None,
    credit: TokenCredit | None = None,
    origin: Origin | None = None,
) -> dict[str, Any]:
    """Return an episode in JSON's types.

    Args:
        trajectory: the episode.
        reader: gives the prompts as text and the tokens' pieces; None leaves both out.
        images: writes image files; None leaves images out.
        credit: values, advantages and masks of the sampled tokens, turn after turn.
        origin: where it was played.
    """
    turns, first = [], 0
    for number, turn in enumerate(trajectory.turns, start=1):
        record = _turn(turn, number=number, reader=reader, images=images)
        if credit is not None:
            record |= credit.of(slice(first, first + len(turn.response_ids)))
        first += len(turn.response_ids)
        turns.append(record)
    return {
        "schema": SCHEMA,
        **asdict(origin or Origin()),
        "group": trajectory.group,
        "member": trajectory.member,
        "seed": trajectory.seed,
        "status": str(trajectory.status),
        "success": bool(trajectory.success),
        "return": trajectory.reward,
        "difficulty": trajectory.difficulty,
        "error": trajectory.error,
        "turns": turns,
        "final_images": _named(trajectory.final_images, images),
    }


def _turn(
    turn: Turn, *, number: int, reader: TokenReader | None, images: ImageFiles | None
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "turn": number,
        "observation": turn.observation.text,
        "images": _named(turn.observation.images, images),
        "prompt_text": None if reader is None else prompt_text(turn.prompt_ids, reader=reader),
        "prompt_ids": turn.prompt_ids.tolist(),
        "prompt_images": _named(turn.prompt_images, images),
        "prompt_patches": None
        if turn.prompt_patches is None
        else [patches.tolist() for patches in turn.prompt_patches],
        "turns_left_out": list(turn.turns_left_out),
        "response": turn.response_text,
        "response_ids": turn.response_ids.tolist(),
        "response_pieces": None if reader is None else reader.pieces(turn.response_ids),
        "logprobs": [float(value) for value in turn.response_logprobs],
        "spans": turn.spans.tolist(),
        "entropy": float(turn.response_entropy),
        "think": turn.think,
        "actions": list(turn.actions),
        "valid": bool(turn.action_is_valid),
        "effective": bool(turn.action_is_effective),
        "hit_length_limit": bool(turn.hit_length_limit),
        "reward": float(turn.reward),
        "reward_terms": turn.reward_terms,
        "statements": [asdict(statement) for statement in turn.statements],
        "temperature": float(turn.temperature),
        "info": turn.info,
    }
    return record


def prompt_text(ids: np.ndarray, *, reader: TokenReader) -> str:
    """Return a prompt as the model saw it, control tokens included, each image's tokens as `<image>`."""
    bundle = reader.bundle
    slot = bundle.image_token_id
    parts: list[str] = []
    rest: list[int] = []
    for token, before in zip(ids.tolist(), [None, *ids.tolist()], strict=False):
        if slot is not None and token == slot:
            if before != slot:
                parts += [_decode(rest, bundle), _IMAGE]
                rest = []
        else:
            rest.append(token)
    return "".join([*parts, _decode(rest, bundle)])


def _decode(ids: Sequence[int], bundle: Any) -> str:
    return str(bundle.tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


def _named(images: Sequence[np.ndarray], files: ImageFiles | None) -> list[str]:
    return [] if files is None else [files.name(image) for image in images]


def write_records(records: Iterable[dict[str, Any]], folder: Path, *, file: str = FILE) -> Path:
    """Write records as JSONL into a folder and return the file's path.

    The file appears under its name once it is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file
    with atomic_write(path) as file, file.open("w", encoding="utf-8") as stream:
        for record in records:
            stream.write(json.dumps(record, ensure_ascii=False, default=_plain) + "\n")
    return path


def write_episodes(
    trajectories: Sequence[Trajectory],
    folder: Path,
    *,
    reader: TokenReader | None = None,
    credit: Sequence[TokenCredit | None] | None = None,
    origin: Origin | None = None,
) -> list[dict[str, Any]]:
    """Write episodes' records and images into a folder and return the records.

    Args:
        trajectories: the episodes.
        folder: where `trajectories.jsonl` and `images/` are written.
        reader: as of `to_record`.
        credit: of each episode, as of `to_record`.
        origin: where they were played.
    """
    images = ImageFiles(folder)
    known = credit or [None] * len(trajectories)
    records = [
        to_record(one, reader=reader, images=images, credit=its, origin=origin)
        for one, its in zip(trajectories, known, strict=True)
    ]
    write_records(records, folder)
    return records


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSONL file; image paths are relative to the file's folder.

    Raises:
        ValueError: a line is no record of this schema.
    """
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                record = json.loads(line)
                schema = record["schema"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected a record, found {line[:60]!r}"
                ) from error
            if schema != SCHEMA:
                raise ValueError(f"{path}, line {number}: found schema {schema}, expected {SCHEMA}")
            yield record


def _plain(value: object) -> object:
    """Return what an environment left in its info in JSON's types, as text where there are none."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value)
