"""Tensors without data have the shapes, types, strides and storages of those with data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ragen_pl.memory.live_memory import LiveMemory
from ragen_pl.memory.tensors import TensorWithoutData, without_data

Operation = Callable[[Tensor], Any]
# of a float32 tensor [2, 4, 6]
OPERATIONS: dict[str, Operation] = {
    "new": lambda x: x.exp() @ x.mT,
    "a number": lambda x: x.long() * 2,
    "another type of number": lambda x: x.long() * 2.0,
    "a boolean": lambda x: x.long() * True,
    "another type": lambda x: x.bfloat16() + 1,
    "a transposed copy": lambda x: x.transpose(0, 2).clone(),
    "a view": lambda x: x.transpose(0, 1)[1:, :, ::2],
    "views": lambda x: x.split([1, 3], dim=1),
    "a view by another shape": lambda x: torch.ops.aten._unsafe_view(x, [8, 6]),
    "in place": lambda x: x.mul_(2).add_(x),
    "in place in a view": lambda x: x[0].zero_(),
    "several results": lambda x: x.max(dim=1),
    "a list": lambda x: torch._foreach_mul([x, x + 1], 2.0),
    "an index": lambda x: x[torch.tensor([0, 1, 1])],
    "a mask": lambda x: x[torch.tensor([[True, False, True, True], [False] * 4])],
    "another mask": lambda x: x[torch.tensor([[True, False, True, False], [False] * 4])],
    "values of a mask": lambda x: x.index_put_((torch.ones(2, 4).bool(),), torch.zeros(8, 6)),
    "a tensor with data": lambda x: x * torch.arange(6),
    "a device": lambda x: torch.zeros_like(x, device=torch.device("cpu")),
    "attention": lambda x: functional.scaled_dot_product_attention(*[x[None]] * 3),
    "no copy": lambda x: x.contiguous(),
    "a copy": lambda x: x.mT.contiguous(),
    "a convolution": lambda x: functional.conv1d(x, x.new_ones(3, 4, 2)),
}  # fmt: skip


def example(*, data: bool) -> Tensor:
    """A tensor with or without data; it needs no gradient, so that it can be changed in place."""
    tensor = torch.arange(48.0).view(2, 4, 6)
    return tensor if data else TensorWithoutData(tensor.to("meta"))


def facts(result: Any) -> Any:
    """Properties of a result that need no values."""
    if not isinstance(result, Tensor):
        return [*map(facts, result)]
    assert not isinstance(result, TensorWithoutData) or result.meta.is_meta
    return (
        result.shape,
        result.stride(),
        result.dtype,
        result.device,
        result.storage_offset(),
        result.untyped_storage().nbytes(),
        result.is_inference(),
    )


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_results_of_one_on_data(name, inference):
    """The second time from what is known of the first."""

    def result(*, data: bool) -> Any:
        tensor = example(data=data)
        with torch.inference_mode(inference):
            return facts(OPERATIONS[name](tensor))

    expected = result(data=True)
    for _ in range(2):
        assert result(data=False) == expected


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_takes_the_memory_of_one_on_data(name):
    def peak(*, data: bool) -> tuple[int, int]:
        tensor, live = example(data=data), LiveMemory()
        with live:
            held = OPERATIONS[name](tensor)
        now = live.now.total()
        del held
        return live.peak.total(), now

    expected = peak(data=True)
    for _ in range(2):
        assert peak(data=False) == expected


def test_what_is_changed_in_place_is_the_tensor():
    tensor = example(data=False)
    assert tensor.add_(1) is tensor
    assert torch.ops.aten.add_.Tensor(tensor, tensor) is tensor
    with pytest.raises(NotImplementedError, match="changes the shape"):
        tensor.squeeze_().unsqueeze_(0)


def test_values_are_missing_and_not_invented():
    tensor = example(data=False)
    for read in (lambda: tensor[0, 0, 0].item(), lambda: bool(tensor.any()), tensor.nonzero):
        with pytest.raises(RuntimeError):
            read()


def test_a_module_has_gradients_and_shares_its_weights():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    module[1].weight.requires_grad_(False)
    without_data(module)
    assert module[0].weight is module[1].weight and not module[0].weight.requires_grad
    inputs = torch.ones(2, 3)
    module(inputs).sum().backward()
    assert module[0].bias.grad is not None and module[0].bias.grad.shape == (3,)
    assert isinstance(module[0].bias.grad, TensorWithoutData) and module[0].weight.grad is None
    assert repr(module[0].bias.grad) == "TensorWithoutData((3,), torch.float32)"
