"""Read files of `torch.save` that somebody else may have written: plain data, and no more memory than the file has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragen_pl.foreign_files import archive_problem, pickle_problem

# levels of containers
_DEPTH = 200
# of what the tensors hold over the bytes of the file: views of one storage may overlap
_TIMES, _MORE = 16, 1 << 26


def load_plain(file: Path) -> Any:
    """Return the tensors and plain data of a file; the tensors stay in the file until they are used.

    Raises:
        ValueError: it is no such file, or would take far more memory than it has bytes.
        pickle.UnpicklingError: it holds something else.
        OSError: it can't be read.
    """
    if not file.exists():
        raise FileNotFoundError(f"there is no file {file}")
    if (problem := archive_problem(file) or pickle_problem(file)) is not None:
        raise ValueError(f"{file} {problem}")
    value = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    check_size(value, file_bytes=file.stat().st_size, name=str(file))
    return value


def check_size(value: Any, *, file_bytes: int, name: str) -> None:
    """Check that a value has no more items than its file has bytes, and tensors of about its size.

    Containers that are held several times count each time, as they do for whoever walks through them.

    Raises:
        ValueError: it is larger, nested too deeply, or holds tensors without values.
    """
    # items and levels of each container by its identity, once all of its own are known
    known: dict[int, tuple[int, int]] = {}
    opened: set[int] = set()
    views: dict[tuple[Any, ...], int] = {}
    stack: list[tuple[Any, bool]] = [(value, False)]
    while stack:
        node, is_done = stack.pop()
        if isinstance(node, Tensor):
            if node.layout != torch.strided or node.device.type != "cpu":
                raise ValueError(f"{name} holds a tensor that is not plain")
            first = node.untyped_storage().data_ptr(), node.storage_offset()
            views[first, node.shape, node.stride(), node.dtype] = node.numel() * node.element_size()
        if not isinstance(node, dict | list | tuple | set) or id(node) in known:
            continue
        if is_done:
            inner = [known.get(id(child), (1, 0)) for child in _children(node)]
            items = 1 + sum(count for count, _ in inner)
            depth = 1 + max((level for _, level in inner), default=0)
            if items > file_bytes or depth > _DEPTH:
                raise ValueError(f"{name} has more items or levels than its size allows")
            known[id(node)] = items, depth
            continue
        if id(node) in opened:
            raise ValueError(f"{name} holds a list or dictionary that contains itself")
        opened.add(id(node))
        stack.append((node, True))
        stack.extend((child, False) for child in _children(node))
    if sum(views.values()) > _TIMES * file_bytes + _MORE:
        raise ValueError(f"{name} has {file_bytes} bytes, and its tensors would take far more")


def _children(node: Any) -> Iterator[Any]:
    yield from node.values() if isinstance(node, dict) else node
