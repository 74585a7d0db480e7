"""Muon for hidden matrices beside AdamW for the other weights, as one optimizer.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest semi-orthogonal matrix: a step changes all
its directions alike. With the scale of Liu et al. (2025, Muon is Scalable for LLM Training, section 2.2) a step is as
large as one of AdamW, and both share a learning rate. Embeddings, heads, norms, biases and convolutions keep AdamW.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Muon, Optimizer

from ragen_pl.base.instances import instances

HIDDEN = "hidden"
"""Key of a parameter group: whether its weights are hidden matrices, see `hidden_matrices`."""

STACK_SIZE = 2**24
"""Numbers in matrices that are orthogonalized together: 64 MiB in float32."""


class MuonAdamW(Optimizer):
    """Muon on the groups of hidden matrices, AdamW on the others.

    Args:
        params: Parameter groups, of which those with `hidden: True` hold hidden matrices only.
        lr: Learning rate of both.
        momentum: Momentum of Muon, with Nesterov's rule.
        betas: Coefficients of AdamW's running means.
        eps: Term in AdamW's denominator.
        weight_decay: Decoupled weight decay of both.
        foreach: Kernels of AdamW, as in torch.
        fused: Kernels of AdamW, as in torch.

    Note:
        A sharded matrix (FSDP2) is gathered, orthogonalized as a whole on each rank, and sharded again: one collective
        in place of several for each product. A step is that of the whole matrix.

    Raises:
        ValueError: A hidden weight is no matrix.
    """

    needs_trust = ()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        groups = [part if isinstance(part, dict) else {"params": [part]} for part in params]
        groups = [{HIDDEN: False, **group, "params": list(group["params"])} for group in groups]
        hidden = [group for group in groups if group[HIDDEN]]
        others = [group for group in groups if not group[HIDDEN]]
        self._inner: dict[bool, Optimizer] = {}
        if hidden:
            self._inner[True] = _Muon(
                hidden,
                lr=lr,
                momentum=momentum,
                weight_decay=weight_decay,
            )
        if others:
            self._inner[False] = AdamW(
                others,
                lr=lr,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                foreach=foreach,
                fused=fused,
            )
        settings = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps}
        joined = [group for inner in self._inner.values() for group in inner.param_groups]
        super().__init__(joined, settings | {"weight_decay": weight_decay})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all weights; return the closure's result."""
        results = []
        for hidden, inner in self._inner.items():
            # a loaded state dict has replaced both
            inner.param_groups = [group for group in self.param_groups if group[HIDDEN] is hidden]
            inner.state = self.state
            results.append(inner.step(closure))
            # the first part has computed all gradients
            closure = None
        return results[0]


class _Muon(Muon):
    """torch's Muon on stacks of matrices of one shape, with Newton-Schulz steps in float32 on a CPU.

    A GPU waits for the kernels of small matrices one by one. A CPU without instructions for bfloat16 takes ten times as
    long for products in it.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the matrices that have a gradient; return the closure's result."""
        loss = evaluated(closure)
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
            for stack in _stacks(weights):
                self._step(stack, group)
        return loss

    def _step(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Step matrices of one shape and device."""
        lr, momentum = group["lr"], group["momentum"]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        means = [self.state[weight]["momentum_buffer"] for weight in weights]
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        if len(weights) == 1:
            directions = [_direction(gradients[0].lerp(means[0], momentum))]
        else:
            stack = torch.stack(torch._foreach_lerp(gradients, means, momentum))
            directions = [*orthogonalized(stack)]
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        for weight, direction in zip(weights, directions, strict=True):
            # the root mean square of a step is about that of AdamW
            weight.add_(direction, alpha=-lr * 0.2 * math.sqrt(max(weight.shape)))


def _direction(momentum: Tensor) -> Tensor:
    """Return the direction of a step from the momentum of a matrix, sharded as that is."""
    if not isinstance(momentum, DTensor):
        return orthogonalized(momentum)
    whole = orthogonalized(momentum.full_tensor())
    # all ranks have the same
    return distribute_tensor(whole, momentum.device_mesh, momentum.placements, src_data_rank=None)


def _stacks(weights: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield matrices of one shape together, up to `STACK_SIZE`; a sharded or a larger one alone."""
    alike = defaultdict(list)
    for weight in weights:
        if isinstance(weight, DTensor):
            yield [weight]
        else:
            alike[weight.shape, weight.device, weight.dtype].append(weight)
    for matrices in alike.values():
        count = max(1, STACK_SIZE // matrices[0].numel())
        yield from (matrices[start : start + count] for start in range(0, len(matrices), count))


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of an optimizer's closure, which computes gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def orthogonalized(matrix: Tensor, *, steps: int = 5) -> Tensor:
    """Return about the nearest semi-orthogonal matrix, by Newton-Schulz iteration.

    Args:
        matrix: Any matrix, or several of one shape, `[count, rows, columns]`.
        steps: Steps of the quintic iteration of Jordan et al. (2024), whose coefficients leave singular values between
            0.7 and 1.2.

    Returns:
        A matrix of the same shape, or several, in float32 on a CPU and in bfloat16 elsewhere.
    """
    is_tall = matrix.size(-2) > matrix.size(-1)
    wide = matrix.mT if is_tall else matrix
    wide = wide.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    several = matrix.ndim == 3
    norm = wide.norm(dim=(1, 2), keepdim=True) if several else wide.norm()
    wide = wide / norm.clamp(min=1e-7)
    add_product = torch.baddbmm if several else torch.addmm
    for _ in range(steps):
        gram = wide @ wide.mT
        polynomial = add_product(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        wide = add_product(wide, polynomial, wide, beta=3.4445)
    return wide.mT if is_tall else wide


def hidden_matrices(module: nn.Module) -> set[Tensor]:
    """Return the weights of a module's linear layers, without those of embeddings and of heads.

    A head is that of a model of transformers, or has one output. Other matrices may have the shape of an embedding.
    """
    from transformers import PreTrainedModel

    parts = list(module.modules())
    heads = [model.get_output_embeddings() for model in instances(parts, PreTrainedModel)]
    ends = {part.weight for part in (*instances(parts, nn.Embedding), *heads) if part is not None}
    linear = {part.weight for part in instances(parts, nn.Linear)}
    return {weight for weight in linear - ends if len(weight) > 1}
