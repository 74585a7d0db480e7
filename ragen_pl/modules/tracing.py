"""Outputs and gradients of a module's parts in a forward and a backward pass, to find where NaN or infinity begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from ragen_pl.base.distributed import own_part

Inputs = TypeVar("Inputs")


@dataclass(kw_only=True, slots=True)
class Norms:
    """Norms of a part of a module in its first call.

    Attributes:
        name: The part's name in the module.
        outputs: Norm of each tensor that it returned, float64 `[]`.
        gradients: Norm of the gradient of each of them that has one, float64 `[]`, in the order of the backward pass.
    """

    name: str
    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    @property
    def output(self) -> float:
        """Norm of all outputs."""
        return _joined(self.outputs)

    @property
    def gradient(self) -> float | None:
        """Norm of the gradients of all outputs, None without any."""
        return _joined(self.gradients) if self.gradients else None


@dataclass(kw_only=True, slots=True)
class StepTrace:
    """Statistics of a forward and a backward pass of a loss.

    Attributes:
        parts: The module's parts in the order in which their calls ended.
        backward: The names of parts in the order in which the gradients of their outputs were known.
        loss: The loss.
        terms: What it is made of.
        weights: Norms of the gradients of the weights by name, of the parts that this rank has.
    """

    parts: dict[str, Norms]
    backward: list[str]
    loss: float
    terms: dict[str, float]
    weights: dict[str, float]

    def first_non_finite(self) -> str | None:
        """Return in words where the first number is that is not finite, None if all are finite.

        The outputs come first in the order of the forward pass, then the loss, then the gradients in the order of the
        backward pass, then the gradients of weights.
        """
        for part in self.parts.values():
            if not _is_finite(part.output):
                return f"the output of {part.name}"
        for name, value in {**self.terms, "loss": self.loss}.items():
            if not _is_finite(value):
                return f"the {name.replace('_', ' ')}"
        for name in self.backward:
            if not _is_finite(self.parts[name].gradient or 0.0):
                return f"the gradient of the output of {name}"
        for name, norm in self.weights.items():
            if not _is_finite(norm):
                return f"the gradient of {name}"
        return None


def trace_step(
    module: nn.Module,
    losses: Callable[[Inputs], tuple[Tensor, Mapping[str, Tensor]]],
    inputs: Inputs,
    *,
    forward_context: AbstractContextManager[object],
) -> StepTrace:
    """Run a forward and a backward pass and return their statistics.

    Args:
        module: Module whose parts are watched. Its gradients are those of this pass afterwards.
        losses: Function of the inputs that returns the loss and its terms by name.
        inputs: Argument of `losses`.
        forward_context: Context of the forward pass, such as autocast.
    """
    module.zero_grad(set_to_none=True)
    parts: dict[str, Norms] = {}
    backward: list[str] = []
    with _watched(module, parts, backward), forward_context:
        loss, terms = losses(inputs)
    loss.backward()
    gradients = {
        name: own_part(weight.grad)
        for name, weight in module.named_parameters()
        if weight.grad is not None
    }
    return StepTrace(
        parts=parts,
        backward=list(dict.fromkeys(backward)),
        loss=float(loss.detach()),
        terms={name: float(value.detach()) for name, value in terms.items()},
        weights={name: float(_norm(gradient)) for name, gradient in gradients.items()},
    )


@contextmanager
def _watched(module: nn.Module, parts: dict[str, Norms], backward: list[str]) -> Iterator[None]:
    """Note the norms of outputs, and later of their gradients, of all parts that are called in the block."""
    handles = []

    def watch(name: str, part: nn.Module) -> None:
        def note_output(_: nn.Module, arguments: object, output: object) -> None:
            if name in parts:
                return
            norms = parts[name] = Norms(name=name)

            def note(tensor: Tensor) -> None:
                if not tensor.is_floating_point():
                    return
                norms.outputs.append(_norm(tensor))
                if tensor.requires_grad:
                    tensor.register_hook(note_gradient)

            def note_gradient(gradient: Tensor) -> None:
                norms.gradients.append(_norm(gradient))
                backward.append(name)

            for tensor in _tensors(output):
                note(tensor)

        handles.append(part.register_forward_hook(note_output))

    for name, part in module.named_modules():
        if name:
            watch(name, part)
    try:
        yield
    finally:
        # layers that are computed again in the backward pass are not counted twice
        for handle in handles:
            handle.remove()


def _tensors(output: object) -> Iterator[Tensor]:
    """Yield the tensors of a module's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif is_dataclass(output):
        for each in fields(output):
            yield from _tensors(getattr(output, each.name))


@torch.no_grad()
def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(own_part(tensor.detach()), dtype=torch.float64)


def _joined(norms: list[Tensor]) -> float:
    return float(torch.stack([norm.cpu() for norm in norms]).norm()) if norms else 0.0


def _is_finite(value: float) -> bool:
    return value - value == 0.0
