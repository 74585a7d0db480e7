"""An episode as one line of JSON, with its images as PNG files: what pages, replays and notebooks read.

`docs/evaluation.md` documents the schema. The per-token values of an update come from
`ragen_pl.viewing.token_credit`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypeVar

import numpy as np
from PIL import Image
from typing_extensions import TypedDict

from ragen_pl.base.error_text import error_text
from ragen_pl.base.files import atomic_write
from ragen_pl.base.foreign_files import plain_json
from ragen_pl.base.json_text import json_text
from ragen_pl.base.rgb import open_picture
from ragen_pl.trajectory import Trajectory, Turn

T = TypeVar("T")
SCHEMA = 2
FILE = "trajectories.jsonl"
IMAGES = "images"
_IMAGE_SLOT = "<image>"
# of an image that is read: 16 MiB and 4096 by 4096 pixels
_MAX_BYTES = _MAX_PIXELS = 1 << 24
# of a line: an episode of a hundred turns with prompts of 30,000 tokens has 20 million
_MAX_CHARACTERS = 1 << 28


class TurnRecord(TypedDict):
    """Types of a turn in a record, by which others' files are checked."""

    prompt_ids: list[int]
    images: list[str]
    prompt_images: list[str]
    turn: NotRequired[int]
    observation: NotRequired[str]
    prompt_text: NotRequired[str | None]
    response: NotRequired[str]
    response_ids: NotRequired[list[int]]
    response_pieces: NotRequired[list[str] | None]
    logprobs: NotRequired[list[float | None]]
    spans: NotRequired[list[int]]
    entropy: NotRequired[float | None]
    think: NotRequired[str | None]
    actions: NotRequired[list[str]]
    valid: NotRequired[bool]
    effective: NotRequired[bool]
    advances: NotRequired[bool]
    trained: NotRequired[bool]
    prompt_patches: NotRequired[list[list[int]] | None]
    turns_left_out: NotRequired[list[int]]
    hit_length_limit: NotRequired[bool]
    reward: NotRequired[float | None]
    reward_terms: NotRequired[dict[str, float | None]]
    statements: NotRequired[list[dict[str, Any]]]
    temperature: NotRequired[float | None]
    state_description: NotRequired[str | None]
    info: NotRequired[dict[str, Any]]
    values: NotRequired[list[float | None]]
    advantages: NotRequired[list[float | None]]
    returns: NotRequired[list[float | None]]


class Record(TypedDict):
    """Types of a record, by which others' files are checked; `return` is a word of Python, and a number."""

    group: int
    seed: int
    status: str
    success: bool
    turns: list[TurnRecord]
    final_images: list[str]
    iteration: NotRequired[int | None]
    validation_set: NotRequired[str | None]
    policy: NotRequired[str]
    member: NotRequired[int]
    error: NotRequired[str | None]
    initial_state: NotRequired[str | None]
    environment: NotRequired[str | None]
    seat: NotRequired[int | None]
    opponent: NotRequired[str | None]
    user_errors: NotRequired[list[list[str]]]


class TokenReader(Protocol):
    """Object that turns token ids into text, such as a `ContextManager`."""

    @property
    def bundle(self) -> Any:
        """The model bundle, for its tokenizer and image token."""

    def pieces(self, ids: np.ndarray) -> list[str]:
        """Return the text of each token of a response."""


@dataclass(kw_only=True, slots=True)
class TokenCredit:
    """Per-token values of an update for the sampled tokens of an episode, in order; None if not available.

    Attributes:
        values: Critic's values before the update, float32 `[tokens]`.
        advantages: float32 `[tokens]`.
        returns: Value targets, float32 `[tokens]`.
        loss_mask: M_loss, bool `[tokens]`.
        advantage_mask: M_adv, bool `[tokens]`.
    """

    values: np.ndarray | None = None
    advantages: np.ndarray | None = None
    returns: np.ndarray | None = None
    loss_mask: np.ndarray | None = None
    advantage_mask: np.ndarray | None = None

    def at(self, tokens: slice) -> dict[str, list[float] | list[bool]]:
        """Return the available values of some of the tokens as JSON types."""
        return {
            name: column[tokens].tolist()
            for name, column in asdict(self).items()
            if column is not None
        }


@dataclass(kw_only=True, slots=True)
class Origin:
    """Where an episode was played.

    Attributes:
        iteration: Training iteration; None for an evaluation.
        validation_set: Name of the validation set; None for training.
        policy: Name of the policy that played.
    """

    iteration: int | None = None
    validation_set: str | None = None
    policy: str = "policy"


class ImageFiles:
    """Image files named by the digest of their pixels, each written once.

    Args:
        folder: Folder of the records; the files go to `images/` in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names: dict[str, str] = {}

    def name(self, image: np.ndarray) -> str:
        """Return the path of an image's file relative to the folder, after writing it if it is new.

        Args:
            image: uint8 `[height, width, 3]`.
        """
        pixels = np.ascontiguousarray(image)
        digest = image_digest(pixels)
        if digest not in self._names:
            name = f"{IMAGES}/{digest}.png"
            file = self.folder / name
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(file) as partial:
                    Image.fromarray(pixels).save(partial, format="PNG")
            self._names[digest] = name
        return self._names[digest]

    def names(self, images: Sequence[np.ndarray]) -> list[str]:
        """Return the paths of several images' files."""
        return [self.name(image) for image in images]


def image_digest(image: np.ndarray) -> str:
    """Return the name of an image's file, without its suffix: a hash of its pixels."""
    pixels = np.ascontiguousarray(image)
    return hashlib.sha256(f"{pixels.shape}".encode() + pixels.tobytes()).hexdigest()[:16]


def sample_groups(groups: Sequence[Hashable], *, count: int) -> list[int]:
    """Return the indices of about `count` episodes: whole groups, spread evenly over all groups.

    Args:
        groups: Group of each episode.
        count: Number of episodes; it is rounded up to whole groups.

    >>> sample_groups([0, 1, 2, 3, 4, 5], count=3), sample_groups([7], count=3)
    ([0, 2, 4], [0])
    >>> sample_groups([1, 1, 2, 2], count=1)
    [0, 1]
    """
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    size = max(map(len, members.values()), default=1)
    kept = min(-(-count // size), len(members))
    in_order = list(members.values())
    return [index for number in range(kept) for index in in_order[number * len(members) // kept]]


def to_record(
    trajectory: Trajectory,
    *,
    reader: TokenReader | None = None,
    images: ImageFiles | None = None,
    credit: TokenCredit | None = None,
    origin: Origin | None = None,
) -> dict[str, Any]:
    """Return an episode as JSON types.

    Args:
        trajectory: Episode to record.
        reader: Source of the prompts' text and the tokens' pieces; None leaves both out.
        images: Image files to write to; None leaves images out.
        credit: Per-token values of the sampled tokens, trained turn after trained turn; an untrained one has none.
        origin: Where the episode was played.
    """
    turns, first = [], 0
    for number, turn in enumerate(trajectory.turns, start=1):
        record = _turn(turn, number=number, reader=reader, images=images)
        if credit is not None and turn.trained:
            record |= credit.at(slice(first, first + len(turn.response_ids)))
            first += len(turn.response_ids)
        turns.append(record)
    return {
        "schema": SCHEMA,
        **asdict(origin or Origin()),
        "group": trajectory.group,
        "member": trajectory.member,
        "seed": trajectory.seed,
        "initial_state": initial_state(trajectory),
        "status": str(trajectory.status),
        "success": bool(trajectory.success),
        "return": trajectory.reward,
        "difficulty": trajectory.difficulty,
        "error": trajectory.error,
        "environment": trajectory.environment,
        "seat": trajectory.seat if trajectory.seats > 1 else None,
        "opponent": trajectory.opponent,
        "user_errors": trajectory.user_errors,
        "turns": turns,
        "final_images": images.names(trajectory.final_images) if images else [],
    }


def initial_state(trajectory: Trajectory) -> str | None:
    """Return a digest of the state that an episode began in, None where it is not recorded."""
    key = trajectory.initial_state_key
    return None if key is None else hashlib.sha256(key.encode()).hexdigest()[:16]


def _turn(
    turn: Turn, *, number: int, reader: TokenReader | None, images: ImageFiles | None
) -> dict[str, Any]:
    patches = turn.prompt_patches
    return {
        "turn": number,
        "observation": turn.observation.text,
        "images": images.names(turn.observation.images) if images else [],
        "prompt_text": prompt_text(turn, reader=reader) if reader else None,
        "prompt_ids": turn.prompt_ids.tolist(),
        "prompt_images": images.names(turn.prompt_images) if images else [],
        "prompt_patches": None if patches is None else [kept.tolist() for kept in patches],
        "turns_left_out": list(turn.turns_left_out),
        "advances": bool(turn.is_task_step),
        "trained": bool(turn.trained),
        "response": turn.response_text,
        "response_ids": turn.response_ids.tolist(),
        "response_pieces": reader.pieces(turn.response_ids) if reader else None,
        "logprobs": [float(value) for value in turn.response_logprobs],
        "spans": turn.spans.tolist(),
        "entropy": turn.response_entropy,
        "think": turn.think,
        "actions": list(turn.actions),
        "valid": bool(turn.action_is_valid),
        "effective": bool(turn.action_is_effective),
        "hit_length_limit": bool(turn.hit_length_limit),
        "reward": float(turn.reward),
        "reward_terms": turn.reward_terms,
        "statements": [asdict(statement) for statement in turn.statements],
        "temperature": float(turn.temperature),
        "state_description": turn.state_description,
        "info": {str(name): _entry(value) for name, value in turn.info.items()},
    }


def prompt_text(turn: Turn, *, reader: TokenReader) -> str:
    """Return a prompt as the model reads it: control tokens included, each image's tokens as `<image>`."""
    bundle = reader.bundle
    shown = turn.prompt_patches
    sizes = [
        bundle.num_image_tokens(image) if shown is None else len(shown[number])
        for number, image in enumerate(turn.prompt_images)
    ]
    # of each image token: images may be beside each other, and have other tokens between their rows
    images = iter(np.repeat(np.arange(len(sizes)), sizes).tolist())
    pieces: list[str] = []
    text_ids: list[int] = []
    previous = None
    for token in turn.prompt_ids.tolist():
        if bundle.image_token_id is None or token != bundle.image_token_id:
            text_ids.append(token)
            continue
        image = next(images, None)
        if image != previous:
            pieces += [_decoded(text_ids, bundle), _IMAGE_SLOT]
            text_ids, previous = [], image
    return "".join([*pieces, _decoded(text_ids, bundle)])


def _decoded(ids: Sequence[int], bundle: Any) -> str:
    return str(bundle.tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


def write_records(records: Iterable[dict[str, Any]], folder: Path, *, file: str = FILE) -> Path:
    """Write records as JSONL into a folder and return the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file
    with (
        atomic_write(path) as partial,
        # an environment's texts may have lone surrogates
        partial.open("w", encoding="utf-8", errors="replace") as stream,
    ):
        for record in records:
            stream.write(json_text(record, ensure_ascii=False, default=_plain) + "\n")
    return path


def write_episodes(
    trajectories: Sequence[Trajectory],
    folder: Path,
    *,
    reader: TokenReader | None = None,
    credit: Sequence[TokenCredit | None] | None = None,
    origin: Origin | None = None,
) -> list[dict[str, Any]]:
    """Write the records and images of episodes into a folder and return the records.

    Args:
        trajectories: Episodes to record.
        folder: Folder for `trajectories.jsonl` and `images/`.
        reader: As for `to_record`.
        credit: Per-token values of each episode, as for `to_record`.
        origin: Where the episodes were played.
    """
    images = ImageFiles(folder)
    records = [
        to_record(trajectory, reader=reader, images=images, credit=tokens, origin=origin)
        for trajectory, tokens in zip(
            trajectories, credit or [None] * len(trajectories), strict=True
        )
    ]
    write_records(records, folder)
    return records


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a JSONL file; their image paths are relative to the file's folder.

    Raises:
        ValueError: A line is not a record of this schema.
    """
    for number, line in read_lines(path):
        yield parse_record(line, place=f"{path}, line {number}")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a JSONL file with their numbers, from 1.

    Raises:
        ValueError: A line is longer than any record.
    """
    with path.open(encoding="utf-8") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(_MAX_CHARACTERS + 1), ""), 1):
            if len(line) > _MAX_CHARACTERS:
                raise ValueError(
                    f"{path}, line {number}: has more than {_MAX_CHARACTERS} characters"
                )
            yield number, line


def parse_record(line: str, *, place: str) -> dict[str, Any]:
    """Return the record in a line.

    Args:
        line: JSON.
        place: File and number of the line, for the message.

    Raises:
        ValueError: It is not a record of this schema.
    """
    try:
        record: dict[str, Any] = plain_json(line)
        schema = record["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place}: expected a record, found {line[:60]!r}") from error
    if schema != SCHEMA:
        raise ValueError(f"{place}: found schema {schema}, expected {SCHEMA}")
    checked_types(Record, record, place=place)
    return record


def checked_types(kind: type[T], value: object, *, place: str) -> T:
    """Return a value of somebody else's file as a type has it, see `ragen_pl.base.typed_json.typed`.

    Raises:
        ValueError: With the first that is wrong.
    """
    # a run that writes records reads none
    from ragen_pl.base.typed_json import TypeFault, typed

    try:
        return typed(kind, value)
    except TypeFault as fault:
        raise ValueError(f"{place}: {fault}") from None


def read_image(folder: Path, name: object, *, formats: Sequence[str] = ("PNG",)) -> bytes | None:
    """Return an image of a record as the bytes of its file, None where there is none.

    A record may be somebody else's and name any file: it gets no other than an image of moderate size in its folder,
    and none that a link leads to.

    Args:
        folder: Folder of the records.
        name: Path of the file, relative to it.
        formats: Names of its formats, as Pillow has them.
    """
    try:
        place = folder.resolve()
        file = place / str(name)
        # a pipe would have to be waited for
        if file.resolve() != file or not (file.is_relative_to(place) and file.is_file()):
            return None
        with file.open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            return None
        with open_picture(data, formats=formats, max_pixels=_MAX_PIXELS) as image:
            image.verify()
    # of Pillow any
    except Exception:
        return None
    return data


def _entry(value: object) -> object:
    """Return an entry of an environment's info, or its text where JSON can't hold it, such as keys that are tuples."""
    try:
        json_text(value, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return error_text(ValueError(value))
    return value


def _plain(value: object) -> object:
    """Return an entry of an environment's info as a JSON type, or as text if there is none."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return str(value)
