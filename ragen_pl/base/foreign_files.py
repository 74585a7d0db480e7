"""Files of somebody else: limits that hold before work is done on them, and nothing outside of their folder."""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

import yaml
from pydantic_core import from_json

from ragen_pl.base.files import disk_errors_of

try:
    from yaml import CSafeLoader as PlainLoader
except ImportError:  # PyYAML without libyaml
    from yaml import SafeLoader as PlainLoader

# of a file of settings: bytes, values, levels, and digits of a number
_SETTINGS_BYTES, _SETTINGS_VALUES, _SETTINGS_DEPTH, _DIGITS = 1 << 18, 20_000, 64, 300
_NUMBER = re.compile(r"[-+.0-9]\S*")
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
# of a description of a model
_DESCRIPTION_BYTES = 1 << 26
# files of a model's folder whose texts are a vocabulary
_VOCABULARY = ("tokenizer.json", "vocab.json", "added_tokens.json")
# a tokenizer's file, its parts that rewrite texts, how many steps they have and how much longer a text may become
_TOKENIZER, _REWRITE = "tokenizer.json", ("normalizer", "decoder")
_STEPS, _TIMES = 64, 256
# names that a library notes and opens nothing by
_NOTES = ("_name_or_path", "name_or_path")
# transformers makes a name for each when it reads a config
_MAX_LABELS = 1_000_000
_ADAPTERS, _BASE = "adapter_config.json", "base_model_name_or_path"
# weights in a pickle, a file of `torch.save`
_PICKLES = ("*.bin", "*.pt", "*.pth")
# calls in a pickle that make room for a number of bytes or values
_MAKE_ROOM = ("bytearray", "Tensor")
_LOCAL_HEADER = b"PK\x03\x04"
# the end of an archive (APPNOTE 4.3.14 to 4.3.16): of a large one, the place of that, and of any one
_END_64, _PLACE_64, _END = (
    struct.Struct("<4sQ2H2L4Q"),
    struct.Struct("<4sLQL"),
    struct.Struct("<4s4H2LH"),
)
# in which zipfile looks for it
_END_BYTES = _END.size + (1 << 16)
# of an entry of the directory: its bytes, and where the lengths of name, extra field and comment stand in them
_ENTRY_BYTES, _LENGTHS, _LENGTHS_AT = 46, struct.Struct("<3H"), 28
# an entry has no other flags than that its sizes follow it and that its name is UTF-8, and is no folder
_FLAGS, _IS_FOLDER = 0x0808, 0x10


class ForeignFileError(ValueError):
    """A file that is not read. The text is a clause that names it."""


def is_inside(folder: Path, file: Path) -> bool:
    """Return whether a file is a plain one inside a folder, whatever links lead to it."""
    return file.is_file() and _real(file).is_relative_to(_real(folder))


def _real(path: Path) -> Path:
    """Return a path without links. One of links that lead to each other stays."""
    return Path(os.path.realpath(path))


def _entries(folder: Path) -> Iterator[Path]:
    """Yield all that is below a folder, without what is behind links, however deep it is."""
    folders = [folder]
    while folders:
        for entry in sorted(folders.pop().iterdir()):
            yield entry
            if entry.is_dir() and not entry.is_symlink():
                folders.append(entry)


def unsafe_entry(folder: Path) -> str | None:
    """Return, as a clause, a link in a folder that leads out of it, or what is no plain file; None if there is none.

    Whoever opens a pipe waits for ever.
    """
    for path in _entries(folder):
        if path.is_symlink() and not _is_of(folder, path):
            return f"{path} is a link that leads out of the folder"
        if not (path.is_symlink() or path.is_file() or path.is_dir()):
            return f"{path} is no plain file"
    return None


def _is_of(folder: Path, path: Path) -> bool:
    """Return whether a path leads into a folder; that of a hub's snapshot includes the blobs of its cache."""
    within = _real(folder)
    blobs = within.parent.parent / "blobs" if within.parent.name == "snapshots" else within
    return any(map(_real(path).is_relative_to, (within, blobs)))


def check_plain(path: Path) -> None:
    """Check that a file is a plain one, or that a folder has plain files only and no link.

    Raises:
        ForeignFileError: It is something else.
    """
    for each in [path, *(_entries(path) if path.is_dir() and not path.is_symlink() else ())]:
        if each.is_symlink() or (each.exists() and not (each.is_file() or each.is_dir())):
            raise ForeignFileError(f"{each} is a link or no plain file")


def settings_text(file: Path) -> str:
    """Return the YAML of a file of settings that can be read in a short time.

    Raises:
        ForeignFileError: It is too large, nested too deeply, or refers to parts of itself.
        OSError: It can't be read.
    """
    if not file.is_file():
        raise ForeignFileError(f"{file} is no plain file")
    with file.open("rb") as stream:
        data = stream.read(_SETTINGS_BYTES + 1)
    if len(data) > _SETTINGS_BYTES:
        raise ForeignFileError(f"{file} has more than {_SETTINGS_BYTES} bytes")
    depth = values = 0
    try:
        text = data.decode()
        for event in yaml.parse(text, Loader=PlainLoader):
            match event:
                case yaml.CollectionStartEvent():
                    depth += 1
                case yaml.CollectionEndEvent():
                    depth -= 1
                case yaml.AliasEvent():
                    # each level of them can double the values
                    raise ForeignFileError(f"{file} has an alias (*{event.anchor[:20]})")
                case yaml.ScalarEvent():
                    values += 1
                    if _is_long_number(event):
                        raise ForeignFileError(f"{file} has a number of more than {_DIGITS} digits")
            if depth > _SETTINGS_DEPTH or values > _SETTINGS_VALUES:
                raise ForeignFileError(
                    f"{file} has more than {_SETTINGS_DEPTH} levels or {_SETTINGS_VALUES} values"
                )
    except ForeignFileError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ForeignFileError(f"{file}: {' '.join(str(error).split())[:200]}") from error
    return text


def _is_long_number(scalar: yaml.ScalarEvent) -> bool:
    is_plain = bool(scalar.implicit[0])
    looks_so = is_plain and _NUMBER.fullmatch(scalar.value) is not None
    return len(scalar.value) > _DIGITS and (looks_so or scalar.tag in _NUMBERS)


def plain_json(text: str | bytes) -> Any:
    """Return a JSON value of a limited depth.

    Raises:
        ValueError: It is none, or is nested too deeply.
    """
    return from_json(text)


def object_in(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in a text, None where there is none."""
    try:
        found = plain_json(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def json_object(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, None where there is none: the file may be damaged, or no plain one."""
    try:
        return readable_json_object(file)
    except OSError:
        return None


def readable_json_object(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, None where there is none.

    Raises:
        OSError: It can't be read, which says nothing about what it holds.
    """
    if not file.is_file() or file.stat().st_size > _DESCRIPTION_BYTES:
        return None
    with disk_errors_of(file):
        return object_in(file.read_bytes())


def archive_problem(file: Path | bytes) -> str | None:
    """Return the fault of a file of `torch.save` as a clause: it takes as much memory as it has bytes.

    `torch.save` compresses nothing, and no two of its entries share bytes.

    Args:
        file: The file, or its content where it is a part of another one.

    Raises:
        OSError: It can't be read.
    """
    if isinstance(file, Path) and file.exists() and not file.is_file():
        return "is no plain file"
    try:
        with _opened(file) as stream:
            # zipfile takes an error of reading the end for another kind of file
            size = stream.seek(0, io.SEEK_END)
            stream.seek(max(0, size - _END_BYTES))
            stream.read()
        with _opened(file) as stream, zipfile.ZipFile(stream) as archive:
            entries = archive.infolist()
            for entry in entries:
                if not 0 <= entry.header_offset < size:
                    return "is damaged"
                stream.seek(entry.header_offset)
                if stream.read(len(_LOCAL_HEADER)) != _LOCAL_HEADER:
                    return "is damaged"
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                return "is compressed, which torch.save does not do"
            if sum(entry.file_size for entry in entries) > size:
                return "has entries that share bytes"
            stream.seek(archive.start_dir)
            if not _fits(stream.read(), archive):
                return "is damaged: its directory has changed since it was written"
    except (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile):
        return "is damaged or no checkpoint"
    return None


def _fits(directory: bytes, archive: zipfile.ZipFile) -> bool:
    """Return whether the directory of an archive agrees with itself: zipfile and torch each read a part of it.

    Args:
        directory: All from its first entry to the end of the file.
        archive: The archive, of entries that are not compressed.
    """
    entries, start, size = archive.infolist(), archive.start_dir, 0
    for entry in entries:
        is_plain = entry.compress_size == entry.file_size and not (
            entry.flag_bits & ~_FLAGS or entry.external_attr & _IS_FOLDER
        )
        if not is_plain or entry.volume or entry.comment:
            return False
        size += _ENTRY_BYTES + sum(_LENGTHS.unpack_from(directory, size + _LENGTHS_AT))
    end, count = directory[size:], len(entries)
    counts, places = [min(count, 0xFFFF)] * 2, (min(number, 0xFFFFFFFF) for number in (size, start))
    expected = _END.pack(b"PK\5\6", 0, 0, *counts, *places, 0)
    if end.startswith(b"PK\6\6") and len(end) >= _END_64.size:
        versions = _END_64.unpack_from(end)[2:4]
        large = b"PK\6\6", _END_64.size - 12, *versions, 0, 0, count, count, size, start
        place = b"PK\6\7", 0, start + size, 1
        expected = _END_64.pack(*large) + _PLACE_64.pack(*place) + expected
    return end == expected


@contextmanager
def _opened(file: Path | bytes) -> Iterator[IO[bytes]]:
    """Open a file, by whose name errors of reading it go, or a part of one."""
    if isinstance(file, Path):
        with disk_errors_of(file), file.open("rb") as stream:
            yield stream
    else:
        yield io.BytesIO(file)


def pickle_problem(file: Path | bytes) -> str | None:
    """Return the fault of the pickle in a file of `torch.save` as a clause: what it makes is in it.

    Args:
        file: The file, or its content where it is a part of another one.
    """
    try:
        with _opened(file) as stream, zipfile.ZipFile(stream) as archive:
            limit = stream.seek(0, io.SEEK_END)
            pickles = [
                archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")
            ]
    except (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile):
        return "is damaged or no checkpoint"
    return next(filter(None, (bare_pickle_problem(one, limit=limit) for one in pickles)), None)


def bare_pickle_problem(content: bytes, *, limit: int) -> str | None:
    """Return the fault of a pickle as a clause.

    Calls in a pickle may copy one text a thousand times. The pickle is read once without them.

    Args:
        content: The pickle.
        limit: Bytes that all its calls may take.
    """
    try:
        _Measure(io.BytesIO(content), limit=limit).load()
    except ForeignFileError as error:
        return str(error)
    except Exception:  # a damaged pickle raises anything
        return "is damaged or no checkpoint"
    return None


class _Measure(pickle._Unpickler):
    """Reads a pickle without its calls, and counts what they would copy or make room for.

    It is the one in Python: that in C makes room for as many objects as a file says.

    Args:
        stream: The pickle.
        limit: Bytes that all calls may take.
    """

    def __init__(self, stream: io.BytesIO, *, limit: int) -> None:
        super().__init__(stream)
        self.left = limit

    def find_class(self, module: str, name: str) -> type:
        """Return a class whose objects stand for what a call makes."""
        return type(name, (_Made,), {"measure": self, "makes_room": name.endswith(_MAKE_ROOM)})

    def persistent_load(self, pid: object) -> None:
        """Return nothing for a tensor's values."""

    def take(self, count: int) -> None:
        """Count items or characters.

        Raises:
            ForeignFileError: They are more than the file has.
        """
        self.left -= count
        if self.left < 0:
            raise ForeignFileError("would take far more memory than it has bytes")


class _Made(dict[Any, Any]):
    """An object in place of one that a call in a pickle makes."""

    measure: _Measure
    makes_room: bool

    def __new__(cls, *arguments: Any) -> Self:
        """Count what a call is given."""
        for each in arguments:
            if isinstance(each, str | bytes | list | tuple | dict | set):
                cls.measure.take(len(each))
            elif isinstance(each, int) and cls.makes_room:
                cls.measure.take(abs(each))
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __setstate__(self, state: object) -> None:
        """Take a state and keep nothing."""

    def append(self, item: object) -> None:
        """Take an item and keep nothing."""


def model_folder_problem(folder: Path) -> str | None:
    """Return the path outside of a model's folder that it names, or why it can't be read, as a clause.

    Libraries open what the folder's descriptions (`config.json`, `tokenizer_config.json`, lists of weights) name.
    """
    if (unsafe := unsafe_entry(folder)) is not None:
        return unsafe
    for file in sorted(folder.glob("*.json")):
        if file.name in _VOCABULARY:
            continue
        if file.stat().st_size > _DESCRIPTION_BYTES:
            return f"{file} has more than {_DESCRIPTION_BYTES} bytes"
        try:
            described = plain_json(file.read_bytes())
        except ValueError as error:
            return f"{file}: {' '.join(str(error).split())[:200]}"
        for key, text in _named(described):
            if file.name == _ADAPTERS and key == _BASE:
                return f"{file}: {key}={text[:200]}: the folder holds adapters of another model"
            if key not in _NOTES and _is_outside(folder, text):
                return f"{file}: {key}={text[:200]} is a file outside of the folder"
            if key == "use_pretrained_backbone":
                return f"{file}: {key}=true loads another model"
        match described:
            case {"num_labels": int(labels)} if labels > _MAX_LABELS:
                return f"{file}: num_labels={labels}: expected at most {_MAX_LABELS}"
    if (problem := _tokenizer_problem(folder / _TOKENIZER)) is not None:
        return problem
    pickles = sorted(file for pattern in _PICKLES for file in folder.glob(pattern))
    for file in pickles:
        if (problem := archive_problem(file) or pickle_problem(file)) is not None:
            return f"{file} {problem}"
    return None


def _tokenizer_problem(file: Path) -> str | None:
    """Return, as a clause, why a tokenizer would make far longer texts of the ones it reads or writes."""
    if not file.exists():
        return None
    try:
        described = plain_json(file.read_bytes())
    except ValueError as error:
        return f"{file}: {' '.join(str(error).split())[:200]}"
    parts = described if isinstance(described, dict) else {}
    for name in _REWRITE:
        growths = list(_growths(parts.get(name)))
        if len(growths) > _STEPS or math.prod(growths) > _TIMES:
            return (
                f"{file}: the {len(growths)} steps of its {name} may make a text more than {_TIMES} times as long, or "
                f"are more than {_STEPS}"
            )
    return None


def _growths(step: Any) -> Iterator[int]:
    """Yield how many times longer a text of one character may become by each step of a tokenizer's part."""
    match step:
        case {"type": "Replace", "pattern": {"String": replaced}} if replaced:
            yield max(1, len(str(step.get("content"))) // len(str(replaced)))
        case {"type": "Replace"}:
            # an expression may match nothing, between any two characters
            yield 1 + len(str(step.get("content")))
        case {"type": "Prepend"}:
            yield 1 + len(str(step.get("prepend")))
        case dict() | list():
            # steps one after the other, in lists or by name
            for each in step.values() if isinstance(step, dict) else step:
                yield from _growths(each)


def _named(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts of a JSON value with the nearest key; true counts as a text of a switch."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _named(child, name)
    elif isinstance(value, list):
        for child in value:
            yield from _named(child, key)
    elif isinstance(value, str):
        yield key, value
    elif value is True and key == "use_pretrained_backbone":
        yield key, "true"


def _is_outside(folder: Path, text: str) -> bool:
    """Return whether a text names a file that is not in a folder, from the folder or from the present one."""
    if not text or len(text) > 4096 or "\0" in text or "\n" in text:
        return False
    try:
        paths = [folder / text, Path(text)]
        return any(
            path.exists() and not path.is_dir() and not _is_of(folder, path) for path in paths
        )
    except OSError:  # too long a name
        return False
