"""Tensors without data: the shapes, types and storages that a run would have, which take no memory.

They say that they are on the CPU, so a model's own conditions and the positions and masks that it makes are those of a
run. Below autograd each operation is one on PyTorch's meta device, whose norms keep their statistics in float32, as a
GPU's do. PyTorch's fake tensors do the same at a multiple of the time, and refuse masks as indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_CPU, _META = torch.device("cpu"), torch.device("meta")
_INDEXING = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
)
_GROUPED = torch.ops.aten._grouped_mm.default
_MOST_KNOWN = 2**15


class _Shape(NamedTuple):
    """Of an operation's argument or result."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


# results of operations that make new tensors, which are the same for arguments of the same shapes
_results: dict[Any, _Shape | tuple[_Shape, ...]] = {}


class TensorWithoutData(Tensor):
    """Tensor on the CPU without values, also those that operations make of it.

    An operation that needs values, such as `item`, raises PyTorch's error of the meta device.

    Attributes:
        meta: Tensor on the meta device, whose storage its views share.
    """

    meta: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: Tensor, *, requires_grad: bool = False) -> TensorWithoutData:
        """Return a tensor of the shape of one on the meta device."""
        tensor = Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=_CPU,
            requires_grad=requires_grad,
        )
        tensor.meta = meta
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show shape and type; there are no values."""
        return f"TensorWithoutData({tuple(self.shape)}, {self.dtype})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage, which has a size and no memory."""
        return self.meta.untyped_storage()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation without data; one that was run with the same shapes is not run again."""
        kwargs = kwargs or {}
        key = (func, _described(args), _described(kwargs.items()))
        try:
            known = _results.get(key)
        except TypeError:  # an argument without a hash
            return _wrapped(*_run(func, args, kwargs))
        if known is not None:
            return _made(known)
        result, given = _run(func, args, kwargs)
        if (shapes := _shapes_of_new(func, result, given)) is not None:
            if len(_results) >= _MOST_KNOWN:
                _results.clear()
            _results[key] = shapes
        return _wrapped(result, given)


def _described(values: Iterable[Any]) -> tuple[Any, ...]:
    described: list[Any] = []
    for value in values:
        match value:
            case Tensor():
                described.append(_Shape(value.size(), value.stride(), value.dtype))
            case list() | tuple():
                described.append(_described(value))
            case _:
                # 1, 1.0 and True have one hash
                described.append((type(value), value))
    return tuple(described)


def _made(shapes: _Shape | tuple[_Shape, ...]) -> Any:
    if isinstance(shapes, _Shape):
        size, stride, dtype = shapes
        return TensorWithoutData(torch.empty_strided(size, stride, dtype=dtype, device=_META))
    return tuple(_made(shape) for shape in shapes)


# arguments by the id of their tensor on the meta device, which is held so that no other gets the id
_Given = dict[int, tuple[Tensor, Tensor]]


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, _Given]:
    """Run an operation on the meta device, in one of the forms that it has there."""
    if func in _INDEXING:
        # the positions that a mask selects, since the mask has no data there
        args = (args[0], [*_positions(args[1])], *args[2:])
    given: _Given = {}
    args = [_on_meta(value, given) for value in args]
    kwargs = {name: _on_meta(value, given) for name, value in kwargs.items()}
    if func is _GROUPED and args[0].dtype is not torch.bfloat16:
        # PyTorch knows the result of experts' matrices in bfloat16 only
        halves = (matrix.bfloat16() for matrix in args[:2])
        return func(*halves, *args[2:], **kwargs).to(args[0].dtype), given
    return func(*args, **kwargs), given


def _positions(index: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
    for indices in index:
        match indices:
            case Tensor(dtype=torch.bool) if type(indices) is not TensorWithoutData:
                yield from indices.nonzero(as_tuple=True)
            case _:
                yield indices


def _on_meta(value: Any, given: _Given) -> Any:
    match value:
        case TensorWithoutData():
            meta = value.meta
        case Tensor():
            size, stride = value.size(), value.stride()
            meta = torch.empty_strided(size, stride, dtype=value.dtype, device=_META)
        case list() | tuple():
            return [_on_meta(each, given) for each in value]
        case torch.device():
            return _META
        case _:
            return value
    given[id(meta)] = value, meta
    return meta


def _wrapped(result: Any, given: _Given) -> Any:
    """Return an operation's result; what it changed in place is the argument."""
    match result:
        case list() | tuple():
            return type(result)([_wrapped(each, given) for each in result])
        case Tensor() if id(result) in given:
            changed, _ = given[id(result)]
            if changed.size() != result.size():
                raise NotImplementedError("an operation changes the shape of a tensor without data")
            return changed
        case Tensor() if torch.is_inference_mode_enabled() and not result.is_inference():
            # a view of a tensor that was made outside of the inference mode
            with torch.inference_mode(mode=False):
                return TensorWithoutData(result)
        case Tensor():
            return TensorWithoutData(result)
        case _:
            return result


def _shapes_of_new(func: Any, result: Any, given: _Given) -> _Shape | tuple[_Shape, ...] | None:
    """Return the shapes of an operation's results, None where they are not all new tensors of their own storage."""
    results = (result,) if isinstance(result, Tensor) else result
    if not isinstance(results, (list, tuple)) or func in _INDEXING:
        return None
    storages = {meta.untyped_storage()._cdata for _, meta in given.values()}
    shapes = []
    for each in results:
        if not isinstance(each, Tensor):
            return None
        storage, shape = each.untyped_storage(), _Shape(each.size(), each.stride(), each.dtype)
        alone = torch.empty_strided(*shape[:2], dtype=each.dtype, device=_META)
        is_same = storage.nbytes() == alone.untyped_storage().nbytes() and not each.storage_offset()
        if storage._cdata in storages or not is_same:
            return None
        storages.add(storage._cdata)
        shapes.append(shape)
    return shapes[0] if isinstance(result, Tensor) else tuple(shapes)


def without_data(module: nn.Module) -> None:
    """Replace parameters and buffers on the meta device by tensors without data; shared ones stay shared.

    Args:
        module: Module, changed in place.
    """
    made: dict[Tensor, Tensor] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in made:
                        made[tensor] = _without_data(tensor)
                    tensors[name] = made[tensor]  # type: ignore[assignment]


def _without_data(tensor: Tensor) -> Tensor:
    empty = TensorWithoutData(torch.empty(tensor.shape, dtype=tensor.dtype, device=_META))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, tensor.requires_grad)
    return empty
