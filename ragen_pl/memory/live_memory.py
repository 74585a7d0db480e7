"""Count the bytes of tensors that code allocates, on real tensors or on those of `ragen_pl.memory.tensors`."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveMemory(TorchDispatchMode):
    """Bytes of the tensors that operations in this context have made and that still exist.

    What a kernel allocates and frees within one operation is not seen, nor is what an allocator adds.

    Args:
        vocabulary: Rows of the language-model head. Tensors with this last dimension are counted as `head`.
        weights: Shapes of the trained weights. Tensors of these shapes that a backward pass makes are counted as
            `gradients`.
    """

    def __init__(self, *, vocabulary: int = 0, weights: Sequence[torch.Size] = ()) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.weights = frozenset(weights)
        self.now: Counter[str] = Counter()
        """Bytes by kind: `head`, `gradients` and `activations`."""
        self.peak: Counter[str] = Counter()
        """The same at the moment with the most bytes in total since `reset_peak`."""
        self._storages: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def reset_peak(self) -> None:
        """Forget earlier peaks."""
        self.peak = Counter(self.now)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count the storages that it returns for the first time."""
        kwargs = kwargs or {}
        for given in (*_tensors(args), *_tensors(kwargs.values())):
            # of weights and inputs, which a view of them would bring in
            self._storages.setdefault(given.untyped_storage(), 0)
        result = func(*args, **kwargs)
        for tensor in _tensors([result]):
            self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._storages:
            return
        size, kind = storage.nbytes(), self._kind(tensor)
        self._storages[storage] = size
        self.now[kind] += size
        weakref.finalize(storage, self._free, kind, size)
        if self.now.total() > self.peak.total():
            self.peak = Counter(self.now)

    def _free(self, kind: str, size: int) -> None:
        self.now[kind] -= size

    def _kind(self, tensor: Tensor) -> str:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and tensor.shape in self.weights:
            return "gradients"
        if tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary:
            return "head"
        return "activations"


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results, and those in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
