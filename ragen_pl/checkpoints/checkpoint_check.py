"""Check that a checkpoint is whole, without torch; and the newest whole one of a folder.

A file of `torch.save` is a zip archive, which has a CRC-32 of each tensor. Reading it takes about 0.6 s of one core for
a gigabyte, and the result is kept while the file stays as it is.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import pickletools
import re
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from ragen_pl.base.files import disk_errors_of
from ragen_pl.base.foreign_files import archive_problem, pickle_problem, readable_json_object

FILES = "files.json"
"""Sizes of the files in a checkpoint's folder and the digest of its list of tensors, written when they are complete."""

LIST = ".metadata"
"""List of the tensors in the folder of a checkpoint, a bare pickle."""

DIGEST = "sha256"
"""Entry of `FILES`: the digest of `LIST`."""

_LOCAL_HEADER = b"PK\x03\x04"
_FOLDER = re.compile(r"[^/]+\.[0-9a-f]{8}\.shards")
# bytes that are read at a time
_READ = 2**20
_ERRORS = (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile)


def problem_of(file: Path, *, folders: bool = True) -> str | None:
    """Return the fault of a file of `torch.save` or its folder as a clause, None if it is whole.

    It is looked at again where there is one: an error of a network or a disk may pass, and a run may have written the
    file anew meanwhile.

    Args:
        file: The checkpoint.
        folders: Whether to read the values in its folder too, and not only the sizes of files. Where several processes
            start at once, each of them checks what it reads.
    """
    return _problem_of(file, folders=folders) and _problem_of(file, folders=folders)


def _problem_of(file: Path, *, folders: bool) -> str | None:
    try:
        structure = _structure(file)
        if structure is None:
            return f"{file} is damaged or no checkpoint"
        if (entry := _damaged(file)) is not None:
            return f"{file} is damaged: {entry} has changed since it was written"
        named = [file.parent / name for name in sorted(_folders_in(structure))]
        return next(filter(None, (_problem_of_folder(one, values=folders) for one in named)), None)
    except OSError as error:
        return f"{error.filename or file} cannot be read ({error.strerror or error})"


def changed_entry(file: Path) -> str | None:
    """Return, as a clause, the first entry of a file of `torch.save` whose values have changed, None if there is none.

    A file that can't be read, or is no such file, is left to its reader.
    """
    try:
        entry = None if _structure(file) is None else _damaged(file)
    except OSError:
        return None
    return None if entry is None else f"{file} is damaged: {entry} has changed since it was written"


def text_in(file: Path, name: str) -> str | None:
    """Return the text of an entry of a checkpoint, None where it has no such text, or can't be read."""
    try:
        state = file.stat()
    except OSError:
        return None
    return _text_in_state(file, name, state.st_ino, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _text_in_state(file: Path, name: str, *state: int) -> str | None:
    try:
        structure = _structure(file)
    except OSError:
        return None
    if structure is None:
        return None
    from ragen_pl.checkpoints.pickle_outline import entry_of

    entry = entry_of(structure, name)
    return entry if isinstance(entry, str) else None


def number_in(checkpoint: Path, entry: str) -> int | None:
    """Return a whole number in a checkpoint, None where it has none. Nothing of it is executed.

    Args:
        checkpoint: The checkpoint.
        entry: Name of the entry.
    """
    with suppress(OSError, ValueError, zipfile.BadZipFile), zipfile.ZipFile(checkpoint) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(name) as stream:
            is_next = False
            for opcode, argument, _ in pickletools.genops(stream):
                if is_next and isinstance(argument, int) and not opcode.name.endswith("PUT"):
                    return argument
                is_next = is_next or argument == entry
    return None


def is_listed(file: Path) -> bool:
    """Return whether a folder has a file by its own list: one that is not found at once may be on a busy network.

    Raises:
        OSError: The folder can't be read.
    """
    return file.parent.is_dir() and file.name in os.listdir(file.parent)


def names_folder(file: Path, name: str) -> bool | None:
    """Return whether a checkpoint has a folder of this name; None where the file can't be read."""
    try:
        structure = _structure(file) if is_listed(file) else b""
    except OSError:
        return None
    return None if structure is None else name.encode() in structure


def _structure(file: Path) -> bytes | None:
    """Return the contents of a file of `torch.save` without its tensors' values, None if it is not whole.

    Raises:
        OSError: It cannot be read.
    """
    if archive_problem(file) is not None:
        return None
    try:
        with disk_errors_of(file), file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            return archive.read(_pickle_in(archive))
    except _ERRORS:
        return None


def _folders_in(structure: bytes) -> set[str]:
    """Return the names of a checkpoint's folders. The file's own name, with which they begin, may have any letters."""
    found: set[str] = set()
    if b".shards" in structure:
        with suppress(ValueError):  # what is no pickle is left to its reader
            texts = (text for _, text, _ in pickletools.genops(structure) if isinstance(text, str))
            found.update(filter(_FOLDER.fullmatch, texts))
    return found


def _pickle_in(archive: zipfile.ZipFile) -> str:
    (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
    return name


def _damaged(file: Path) -> str | None:
    """Return the first entry of a file whose values differ from their digest, None if there is none."""
    state = file.stat()
    return _damaged_in_state(file, state.st_ino, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _damaged_in_state(file: Path, *state: int) -> str | None:
    with disk_errors_of(file), file.open("rb") as stream:
        return _damaged_in(stream)


def _damaged_in(stream: IO[bytes]) -> str | None:
    """Return the first entry of a file of `torch.save` that has changed: where a tensor stands, or a record's name."""
    with zipfile.ZipFile(stream) as archive:
        for record in archive.infolist():
            try:
                with archive.open(record) as values:
                    while values.read(_READ):
                        pass
            except _ERRORS:
                from ragen_pl.checkpoints.pickle_outline import place_of

                place = place_of(record.filename, archive.read(_pickle_in(archive)))
                return place or f"its record {record.filename}"
    return None


def _problem_of_folder(folder: Path, *, values: bool) -> str | None:
    """Return the missing or damaged part of a checkpoint's folder as a clause. Without a list of files it is whole."""
    if not folder.is_dir():
        return f"the checkpoint's folder {folder} is not there"
    listed = folder / FILES
    sizes = readable_json_object(listed) if listed.exists() else {}
    if sizes is None:
        return f"{listed} is damaged"
    for name, size in sizes.items():
        if name == DIGEST:
            continue
        file = folder / name
        found = file.stat().st_size if file.exists() else 0
        if found != size:
            return f"{file} has {found} of {size} bytes"
    if (problem := list_problem(folder)) is not None:
        return problem
    return next(_damaged_in_folder(folder), None) if values else None


def list_problem(folder: Path) -> str | None:
    """Return, as a clause, that the list of tensors in a checkpoint's folder is not the one that was written there.

    An earlier version wrote no digest of it.
    """
    digest = (readable_json_object(folder / FILES) or {}).get(DIGEST)
    listed = folder / LIST
    with disk_errors_of(listed):
        if digest is None or hashlib.sha256(listed.read_bytes()).hexdigest() == digest:
            return None
    return f"{listed} is damaged: it has changed since it was written"


def _damaged_in_folder(folder: Path) -> Iterator[str]:
    """Yield clauses on the tensors and states of a folder that have changed since they were written."""
    for file in sorted(filter(_is_archive, folder.glob("*.pt"))):
        entry = "its list of entries" if _structure(file) is None else _damaged(file)
        if entry is not None:
            yield f"{file} is damaged: {entry} has changed since it was written"
    listed = folder / LIST
    if listed.exists():
        states = [one.stat() for one in (listed, *sorted(folder.glob("*.distcp")))]
        found = _damaged_item(folder, tuple((one.st_size, one.st_mtime_ns) for one in states))
        if found is not None:
            yield found


def _is_archive(file: Path) -> bool:
    with disk_errors_of(file), file.open("rb") as stream:
        return stream.read(len(_LOCAL_HEADER)) == _LOCAL_HEADER


@functools.lru_cache(maxsize=64)
def _damaged_item(folder: Path, states: Any) -> str | None:
    from ragen_pl.checkpoints.pickle_outline import class_in, items_of

    listed = folder / LIST
    with disk_errors_of(listed):
        content = listed.read_bytes()
    items = items_of(content)
    if items is None:
        found = class_in(content)
        return f"{listed} is damaged or no list of tensors" + (
            f": it holds {found}" if found else ""
        )
    sizes = {part: (folder / part).stat().st_size for part in {item[1] for item in items}}
    if sum(length for *_, length in items) > sum(sizes.values()):
        return f"{listed} lists tensors that share bytes"
    for name, part, offset, length in items:
        file = folder / part
        if not item_is_whole(file, offset=offset, length=length):
            return f"{file} is damaged: {name} has changed since it was written"
    return None


def item_is_whole(file: Path, *, offset: int, length: int) -> bool:
    """Return whether a tensor of a sharded checkpoint is as it was written: a file of `torch.save` in another one.

    One that would take far more memory than it has bytes is not.

    Args:
        file: The file that it is in.
        offset: Its first byte there.
        length: Its number of bytes.
    """
    if offset + length > file.stat().st_size:
        return False
    with disk_errors_of(file), file.open("rb") as stream:
        stream.seek(offset)
        content = stream.read(length)
    if archive_problem(content) is not None or pickle_problem(content) is not None:
        return False
    try:
        return _damaged_in(io.BytesIO(content)) is None
    except _ERRORS:
        return False


def newest_whole(files: Iterable[Path], *, folders: bool = True) -> Path | None:
    """Return the file that was written last among the whole checkpoints, None if there is none."""
    ordered = sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name), reverse=True)
    return next((file for file in ordered if problem_of(file, folders=folders) is None), None)
