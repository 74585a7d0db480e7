"""Gradient of one term of the loss, clipped apart from that of the others.

One norm for a sum of terms lets the largest decide how far the others may move the weights. Right after a policy
leaves its reference the gradient of the divergence is many times that of the policy's own loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ragen_pl.base.distributed import sum_over_ranks, world_size


class SeparateGradients:
    """Gradients of a term, added up over the minibatches of an optimizer step.

    They are computed by `torch.autograd.grad`, a second backward pass through the graph of the minibatch that calls no
    hook of the weights, so those of DDP see the other terms alone. The weights must be whole on each rank.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, term: Tensor, module: nn.Module) -> None:
        """Add the gradients of a minibatch's term, float `[]`. Its graph is kept for the other terms."""
        weights = _trained(module)
        gradients = torch.autograd.grad(
            term, list(weights.values()), retain_graph=True, allow_unused=True
        )
        for name, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                known = self._sums.get(name)
                # a checkpoint inside a step is read on the host
                self._sums[name] = (
                    gradient if known is None else gradient + known.to(gradient.device)
                )

    def average_over_ranks(self, module: nn.Module) -> None:
        """Average the gradients over the ranks, as DDP does with the others. All ranks must call it."""
        if world_size() == 1:
            return
        weights = _trained(module)
        # a rank without images has no gradient for the encoder; the critic's head has one on no rank
        ranks_with_one = sum_over_ranks(torch.tensor([int(name in self._sums) for name in weights]))
        for (name, weight), number in zip(weights.items(), ranks_with_one.tolist(), strict=True):
            if number:
                own = self._sums.get(name)
                total = sum_over_ranks(torch.zeros_like(weight) if own is None else own)
                self._sums[name] = total / world_size()

    def norm(self) -> Tensor:
        """Return the norm of all gradients together, `[]`."""
        return torch.nn.utils.get_total_norm(list(self._sums.values()))

    def add_to(self, module: nn.Module, *, max_norm: float, norm: Tensor) -> None:
        """Scale the gradients to at most a norm and add them to those of the module's weights."""
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for name, weight in _trained(module).items():
            gradient = self._sums.get(name)
            if gradient is not None:
                gradient = gradient * scale.to(gradient.device)
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

    def clear(self) -> None:
        """Drop the gradients."""
        self._sums = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the gradients of this rank by the names of the weights."""
        return dict(self._sums)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from the gradients of `state_dict`."""
        self._sums = dict(state)


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
