"""The few collectives that the trainer needs; each is the identity in a single process."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torchmetrics.utilities.distributed import gather_all_tensors

from ragen_pl.base.error_text import named_error

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=BaseException)


def is_distributed() -> bool:
    """Return whether several processes train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Return this process's number, 0 in a single process."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if is_distributed() else 1


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of the ranks' tensors, all of the same shape."""
    return _reduce(tensor, dist.ReduceOp.SUM)


def max_over_ranks(tensor: Tensor) -> Tensor:
    """Return the largest of the ranks' values, element by element, of tensors of the same shape."""
    return _reduce(tensor, dist.ReduceOp.MAX)


def _reduce(tensor: Tensor, op: Any) -> Tensor:
    if not is_distributed():
        return tensor
    reduced = tensor.clone()
    if _by_nccl_alone():
        reduced = reduced.cuda()
    dist.all_reduce(reduced, op=op)
    return reduced.to(tensor.device)


def _by_nccl_alone(group: Any = None) -> bool:
    """Return whether collectives take tensors of GPUs only."""
    return bool(dist.get_backend(group) == "nccl")


def any_over_ranks(flag: bool) -> bool:
    """Return whether the flag is set on any rank. All ranks must call it."""
    return bool(sum_over_ranks(torch.tensor(float(flag)))) if is_distributed() else flag


def gather_states(state: Tensor, group: Any = None) -> list[Tensor]:
    """Return every rank's state of a metric, for torchmetrics. NCCL cannot gather tensors on the CPU."""
    if state.is_cuda or not _by_nccl_alone(group):
        return list(gather_all_tensors(state, group))
    return [gathered.to(state.device) for gathered in gather_all_tensors(state.cuda(), group)]


def gather_over_ranks(value: T) -> list[T]:
    """Return every rank's value, in rank order, on every rank. Values must be picklable.

    On several ranks their tensors are in the host's memory: another rank may not see this one's device. Each rank
    receives the size of the largest value from every rank, so values have to be small: see `exchanged`, `values_of`.
    """
    if not is_distributed():
        return [value]
    gathered: list[bytes | None] = [None] * world_size()
    dist.all_gather_object(gathered, packed_on_host(value))
    return [pickle.loads(cast(bytes, packed)) for packed in gathered]


def values_of(sources: Sequence[int], value: T) -> list[T]:
    """Return the values of some ranks, in the order of `sources`, on every rank. All ranks must call it.

    A rank receives the size of these values, on any number of ranks: they are broadcast one after the other.

    Args:
        sources: The ranks, the same on every rank.
        value: This rank's value: picklable. Other ranks receive its tensors in the host's memory.
    """
    if not is_distributed():
        return [value for _ in sources]
    values = []
    for source in sources:
        sent = [packed_on_host(value) if source == rank() else None]
        dist.broadcast_object_list(sent, src=source)
        values.append(pickle.loads(cast(bytes, sent[0])))
    return values


def exchanged(outgoing: Mapping[int, T]) -> list[T]:
    """Return the values that other ranks send to this one, in the order of the senders. All ranks must call it.

    A value goes from its rank to its receiver alone, besides 8 bytes between any two ranks.

    Args:
        outgoing: What this rank sends to others, by rank: picklable values. Others receive their tensors in the
            host's memory.
    """
    if not is_distributed():
        return []
    device = "cuda" if _by_nccl_alone() else "cpu"
    packed = [
        packed_on_host(outgoing[number]) if number in outgoing else b""
        for number in range(world_size())
    ]
    sizes = torch.tensor([len(part) for part in packed], device=device)
    arriving = torch.empty_like(sizes)
    dist.all_to_all_single(arriving, sizes)
    # torch makes no tensor of an empty buffer
    content = torch.frombuffer(bytearray(b"".join(packed)) or bytearray(1), dtype=torch.uint8)
    content = content[: int(sizes.sum())]
    received = torch.empty(int(arriving.sum()), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, content.to(device), arriving.tolist(), sizes.tolist())
    parts = received.cpu().split(arriving.tolist())
    return [pickle.loads(part.numpy()) for part in parts if len(part)]


def packed_on_host(value: object) -> bytes:
    """Return a value's pickle, with all of its tensors in the host's memory."""
    buffer = io.BytesIO()
    _HostPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _HostPickler(pickle.Pickler):
    """Pickles tensors of a device as copies of them on the host."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return value.cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


class StopRequestedError(Exception):
    """A rank asks all ranks to stop, which is no failure. `all_ranks_do` raises another rank's error instead."""


class _Errors:
    """Handler of a rank's error, called before the other ranks meet that rank."""

    listener: Callable[[Exception], None] | None = None


@contextmanager
def errors_told(listener: Callable[[Exception], None]) -> Iterator[None]:
    """Call a function with an error in `all_ranks_do` as soon as it is raised on this rank."""
    _Errors.listener = listener
    try:
        yield
    finally:
        _Errors.listener = None


def tell_error(error: Exception) -> None:
    """Call the function of `errors_told`, if there is one, with an error that ends this rank."""
    if _Errors.listener is not None:
        _Errors.listener(error)


def all_ranks_do(work: Callable[[], T]) -> T:
    """Return a function's result; an error of one rank is raised on all. All ranks must call it.

    The function must not wait for other ranks: one that fails in it is not there.
    """
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
        if not isinstance(error, StopRequestedError):
            # other ranks may be busy for long
            tell_error(error)
    try:
        errors = gather_over_ranks(None if error is None else sendable(error))
    except Exception:
        # the other ranks have ended
        if error is not None:
            raise error from None
        raise
    raised = [number for number, other in enumerate(errors) if other is not None]
    if raised:
        # the first one of those that are failures
        first = min(raised, key=lambda number: isinstance(errors[number], StopRequestedError))
        chosen = error if first == rank() else errors[first]
        assert chosen is not None
        raise chosen
    return result


def sendable(error: ErrorT) -> ErrorT | RuntimeError:
    """Return an error as other ranks can read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(named_error(error))
    return error


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor's whole value, or another tensor itself. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def on_first_rank(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with whole tensors in the first rank's host memory, gathered one after the other; else empty.

    All ranks must call it.
    """
    gathered = {}
    for name, value in state.items():
        value = whole(value.detach()).cpu() if isinstance(value, Tensor) else value
        if rank() == 0:
            gathered[name] = value
    return gathered


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, or another tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a whole tensor sharded as another one of its shape; the tensor itself if that is not sharded."""
    if not isinstance(other, DTensor) or isinstance(tensor, DTensor):
        return tensor
    mesh = other.device_mesh
    # every rank has the whole tensor, so nothing is sent
    return distribute_tensor(
        tensor.to(mesh.device_type), mesh, other.placements, src_data_rank=None
    )


def with_part(part: Tensor, other: Tensor) -> Tensor:
    """Return the sharded tensor of which `part` is this rank's part, sharded as `other`; see `own_part`."""
    if not isinstance(other, DTensor):
        return part.to(other.device)
    return DTensor.from_local(
        part.to(other.device),
        other.device_mesh,
        other.placements,
        shape=other.shape,
        stride=other.stride(),
    )
