"""Files of somebody else take no more memory than they have: those of `torch.save`, and models of their settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ragen_pl.base.foreign_files import archive_problem, pickle_problem

# levels of containers
_DEPTH = 200
# of what the tensors hold over the bytes of the file: views of one storage may overlap
_TIMES, _MORE = 16, 1 << 26
# of what building a model makes over its weights: values, and tensors
_VALUES, _MORE_VALUES, _TENSORS, _MORE_TENSORS = 2, 1 << 22, 8, 1 << 10
# functions that make a tensor without another one, and their arguments that the meta device does not take
_MAKERS = frozenset(
    {
        *(torch.empty, torch.empty_strided, torch.zeros, torch.ones, torch.full, torch.eye, torch.arange),
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.linspace),
    }
)  # fmt: skip
_NOT_META = ("generator", "out", "pin_memory", "device")


def load_plain(file: Path) -> Any:
    """Return the tensors and plain data of a file; the tensors stay in the file until they are used.

    Raises:
        ValueError: It is no such file, or would take far more memory than it has bytes.
        pickle.UnpicklingError: It holds something else.
        OSError: It can't be read.
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
        ValueError: It is larger, nested too deeply, or holds tensors without values.
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


class TooLargeError(ValueError):
    """A tensor would make a model far larger than its weights. The text is a clause."""


class NoLargerThan(TorchFunctionMode):
    """Context in which a model is built for weights: it ends before a tensor that they have no room for.

    A tensor counts before memory is taken for it.

    Args:
        weights: All weights that the model is to have.

    Raises:
        TooLargeError: In the block.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._held = sum(weight.numel() for weight in weights.values())
        self._values_left = _VALUES * self._held + _MORE_VALUES
        self._tensors_left = _TENSORS * len(weights) + _MORE_TENSORS

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        given = kwargs or {}
        if func in _MAKERS:
            described = {key: value for key, value in given.items() if key not in _NOT_META}
            self._take(func(*args, **described, device="meta"))
        return func(*args, **given)

    def _take(self, tensor: Tensor) -> None:
        self._values_left -= tensor.numel()
        self._tensors_left -= 1
        if self._values_left < 0 or self._tensors_left < 0:
            raise TooLargeError(
                f"a tensor of shape {list(tensor.shape)} would make the model far larger than the weights, which have "
                f"{self._held} values"
            )
