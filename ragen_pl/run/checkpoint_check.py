"""Check that a checkpoint is whole, in milliseconds and without torch; and the newest whole one of a folder."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

FILES = "files.json"
"""Sizes of the files in the folder of a checkpoint, written when they are complete."""

_LOCAL_HEADER = b"PK\x03\x04"
_FOLDER = re.compile(rb"[\w.=+-]+\.[0-9a-f]{8}\.shards")


def problem_of(file: Path) -> str | None:
    """Return the fault of a file of `torch.save` or its folder as a clause, None if it is whole.

    The directory at the end of the file says where each tensor begins, and has a checksum of everything but the
    tensors' values.
    """
    structure = _structure(file)
    if structure is None:
        return f"{file} is damaged or no checkpoint"
    folders = sorted(file.parent / name.decode() for name in set(_FOLDER.findall(structure)))
    return next(filter(None, map(_problem_of_folder, folders)), None)


def names_folder(file: Path, name: str) -> bool:
    """Return whether a whole checkpoint has a folder of this name."""
    return name.encode() in ((_structure(file) if file.exists() else None) or b"")


def _structure(file: Path) -> bytes | None:
    """Return the contents of a file of `torch.save` without its tensors' values, None if it is not whole."""
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
            for entry in archive.infolist():
                stream.seek(entry.header_offset)
                if stream.read(len(_LOCAL_HEADER)) != _LOCAL_HEADER:
                    return None
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            return archive.read(name)
    except (OSError, ValueError, zipfile.BadZipFile):
        return None


def _problem_of_folder(folder: Path) -> str | None:
    """Return the missing part of a checkpoint's folder as a clause. Without a list of files it is whole."""
    if not folder.is_dir():
        return f"the checkpoint's folder {folder} is not there"
    listed = folder / FILES
    try:
        sizes = json.loads(listed.read_text()) if listed.exists() else {}
    except ValueError:
        return f"{listed} is damaged"
    for name, size in sizes.items():
        file = folder / name
        found = file.stat().st_size if file.exists() else 0
        if found != size:
            return f"{file} has {found} of {size} bytes"
    return None


def newest_whole(files: Iterable[Path]) -> Path | None:
    """Return the file that was written last among the whole checkpoints, None if there is none."""
    ordered = sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name), reverse=True)
    return next((file for file in ordered if problem_of(file) is None), None)
