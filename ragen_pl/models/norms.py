"""RMS norms in one kernel on a GPU.

transformers computes an RMS norm (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467) by seven to ten kernels,
which a GPU waits for while it samples token by token. PyTorch has one kernel for it. On other devices a norm's own
forward runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from ragen_pl.base.instances import instances

Kernel = Callable[[Tensor, Sequence[int], Tensor, float], Tensor]
"""Computes an RMS norm, with the arguments of `torch.nn.functional.rms_norm`."""

# added to the weights: Gemma's norms multiply by 1 + weight
_OFFSETS = (0.0, 1.0)
# inputs beside which an eps is small, and is not
_SCALES = (1.0, 1e-3)
# relative error of a norm, by the type of its input
_TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 0.02}


@dataclass(eq=False, slots=True)
class FusedNorm:
    """Forward of an RMS norm, in one kernel on a GPU where input and weights have one type.

    It is an attribute of its module: a copy of the module has a copy of it, with the copy's weights.

    Attributes:
        norm: Module with the weights, and with the forward that runs otherwise.
        eps: Term that is added to the mean square.
        offset: Term that is added to the weights.
        kernel: Kernel on any device; None for PyTorch's, on a GPU.
    """

    norm: nn.Module
    eps: float
    offset: float
    kernel: Kernel | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return normed states in the shape and type of `hidden`, `[…, width]`."""
        norm, kernel = self.norm, self.kernel
        weight = norm.weight
        assert isinstance(weight, Tensor)
        if kernel is None and hidden.is_cuda:
            kernel = functional.rms_norm
        if kernel is None or hidden.dtype is not weight.dtype:
            output: Tensor = type(norm).forward(norm, hidden)
            return output
        return _normed(hidden, weight, self.eps, offset=self.offset, kernel=kernel)


def fuse_norms(model: nn.Module, *, kernel: Kernel | None = None) -> int:
    """Let a model's RMS norms run in one kernel on a GPU.

    What a norm is shows in what it computes: a module with one vector of weights that maps random values as
    `torch.nn.functional.rms_norm` does, with an eps that it has as an attribute. Others are left as they are, and so
    are those whose forward somebody replaced.

    Args:
        model: Model, changed in place. Its weights, their names and its config stay the same.
        kernel: Kernel on any device; None for that of an earlier call, or else PyTorch's on a GPU.

    Returns:
        Number of such norms.
    """
    found: dict[object, tuple[float, float] | None] = {}
    count = 0
    for part in model.modules():
        replaced = vars(part).get("forward")
        if isinstance(replaced, FusedNorm):
            replaced.kernel = kernel or replaced.kernel
            count += 1
            continue
        if replaced is not None or not _may_be_norm(part):
            continue
        values = {key: each for key, each in vars(part).items() if isinstance(each, (int, float))}
        key = (type(part), len(part.weight), *sorted(values.items()))  # type: ignore[arg-type]
        if key not in found:
            found[key] = _rule(part)
        if (rule := found[key]) is not None:
            eps, offset = rule
            part.forward = FusedNorm(part, eps, offset, kernel)
            count += 1
    return count


@contextmanager
def own_norms(model: nn.Module) -> Iterator[None]:
    """Let a model's norms run by their own forward for a while, as in a process of transformers alone."""
    fused = instances((vars(part).get("forward") for part in model.modules()), FusedNorm)
    for forward in fused:
        del forward.norm.forward
    try:
        yield
    finally:
        for forward in fused:
            forward.norm.forward = forward


def _normed(hidden: Tensor, weight: Tensor, eps: float, *, offset: float, kernel: Kernel) -> Tensor:
    if offset:
        # a weight near 0 is added to the offset before it is rounded
        normed = kernel(hidden.float(), weight.shape, offset + weight.float(), eps)
    else:
        normed = kernel(hidden, weight.shape, weight, eps)
    # autocast computes norms in float32
    return normed.to(hidden.dtype)


def _may_be_norm(module: nn.Module) -> bool:
    """Return whether a module has one vector of weights and nothing else, and maps one tensor."""
    # a module with others inside would list all weights of a model, again at each level
    weights = dict(module.named_parameters(recurse=False))
    return (
        [*weights] == ["weight"]
        and weights["weight"].ndim == 1
        and weights["weight"].is_floating_point()
        and not [*module.children(), *module.buffers()]
        and len(inspect.signature(module.forward).parameters) == 1
    )


@torch.no_grad()
def _rule(module: nn.Module) -> tuple[float, float] | None:
    """Return eps and offset of the RMS norm that a module computes, None for none.

    Both are measured on the CPU and without its weights, which may have no data.
    """
    shape = torch.Size([len(module.weight)])  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    weight, values = (
        torch.randn(size, generator=generator, device="cpu", dtype=torch.float32)
        for size in (shape, (2, 3, *shape))
    )
    candidates = instances(vars(module).values(), float)
    rules = [(eps, offset) for eps in candidates for offset in _OFFSETS]
    for dtype, tolerance in _TOLERANCES.items():
        own = weight.to(dtype)
        for scale in _SCALES:
            # without a mean of 0, so that a norm that subtracts it is another
            hidden = (scale * (values + 0.5)).to(dtype)
            try:
                output = functional_call(module, {"weight": own}, (hidden,))
            # a module for other inputs raises anything
            except Exception:
                return None
            rules = [
                (eps, offset)
                for eps, offset in rules
                if _same(
                    output,
                    _normed(hidden, own, eps, offset=offset, kernel=functional.rms_norm),
                    tolerance,
                )
            ]
    return rules[0] if rules else None


def _same(output: object, expected: Tensor, tolerance: float) -> bool:
    return (
        isinstance(output, Tensor)
        and (output.dtype, output.shape) == (expected.dtype, expected.shape)
        and torch.allclose(output, expected, rtol=tolerance, atol=0.0)
    )
