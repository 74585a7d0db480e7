"""States of the ranks in a checkpoint: samples, accumulated gradients, a rollout ahead.

On several ranks each writes a file of its own into a folder beside the checkpoint, which names the files with their
sizes and digests. Gathered, they would fill the memory of every rank.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch

from ragen_pl.base.distributed import all_ranks_do, gather_over_ranks, is_distributed, rank
from ragen_pl.base.files import atomic_write
from ragen_pl.base.tensor_files import load_plain

T = TypeVar("T")

_KIND = "ragen_pl.rank_states"


class RankStatesError(ValueError):
    """State of the ranks in a checkpoint that cannot be restored. The text is one line with the remedy."""


class _Written:
    """The checkpoint that is being written."""

    folder: Path | None = None


@contextmanager
def rank_states_in(folder: Path) -> Iterator[None]:
    """Let `save_rank_states` write into a folder next to the checkpoint that is written in the block."""
    _Written.folder = folder
    try:
        yield
    finally:
        _Written.folder = None


def folder_of_states() -> Path | None:
    """Return the folder of `rank_states_in`, None outside such a block."""
    return _Written.folder


def save_rank_states(state: T, *, name: str) -> list[T] | dict[str, Any]:
    """Return the states of all ranks, as a checkpoint holds them. All ranks must call it.

    Args:
        state: This rank's state: tensors and plain values.
        name: Part of the names of the files.

    Returns:
        A list on a single rank, and where no `rank_states_in` names a folder; else the names of the files.
    """
    folder = _Written.folder
    if folder is None or not is_distributed():
        return gather_over_ranks(state)
    file = folder / f"{name}_{rank()}.pt"
    entries = gather_over_ranks(all_ranks_do(lambda: _write(state, file)))
    return {"kind": _KIND, "folder": folder.name, "files": entries}


def _write(state: object, file: Path) -> dict[str, Any]:
    file.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with atomic_write(file, durable=True) as partial:
        with partial.open("wb") as stream:
            torch.save(state, cast(IO[bytes], _Digesting(stream, digest)))
        size = partial.stat().st_size
    return {"name": file.name, "bytes": size, "sha256": digest.hexdigest()}


class _Digesting(io.RawIOBase):
    """A file whose content goes into a digest while it is written, front to back."""

    def __init__(self, stream: io.BufferedWriter, digest: Any) -> None:
        super().__init__()
        self._stream, self._digest = stream, digest

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._digest.update(content)
        return self._stream.write(content)

    def flush(self) -> None:
        self._stream.flush()


@dataclass(frozen=True, slots=True)
class RankStates(Sequence[Any]):
    """The states of all ranks in the files of a checkpoint. A state is read when it is asked for.

    Attributes:
        folder: Folder of the files.
        files: Name, size and digest of each rank's file.
    """

    folder: Path
    files: tuple[Mapping[str, Any], ...]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: Any) -> Any:
        """Return a rank's state.

        Raises:
            RankStatesError: Its file is missing or has changed.
        """
        entry = self.files[number]
        file = self.folder / plain_name(entry["name"])
        if not file.exists() or file.stat().st_size != entry["bytes"]:
            raise RankStatesError(f"{file}: expected a file of {entry['bytes']} bytes; copy it too")
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != entry["sha256"]:
            raise RankStatesError(
                f"{file}: is damaged or of another rank or checkpoint, its digest differs from the checkpoint's; "
                "copy the folder of this checkpoint again, or resume from another one"
            )
        return load_plain(file)


def load_rank_states(checkpoint: Any, *, folder: Path) -> Any:
    """Return a checkpoint with the states of all ranks in place of the names of their files.

    Args:
        checkpoint: What the file of the checkpoint holds, or a part of it.
        folder: Folder of that file.

    Raises:
        RankStatesError: It names files elsewhere.
    """
    # subclasses are states of modules
    if type(checkpoint) is dict:
        if checkpoint.get("kind") == _KIND:
            states = folder / plain_name(checkpoint["folder"])
            return RankStates(states, tuple(checkpoint["files"]))
        return {name: load_rank_states(value, folder=folder) for name, value in checkpoint.items()}
    if isinstance(checkpoint, list):
        return [load_rank_states(value, folder=folder) for value in checkpoint]
    return checkpoint


def plain_name(name: object) -> str:
    """Return a name of a file or folder without a path.

    Raises:
        RankStatesError: It is none.
    """
    if not isinstance(name, str) or Path(name).name != name:
        raise RankStatesError(
            f"a checkpoint names the file {name!r}, expected a name without a path; give one that ragen_pl wrote"
        )
    return name
