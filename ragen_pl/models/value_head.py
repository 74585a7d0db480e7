"""The critic's head on decoder states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn


class StateCritic(Protocol):
    """Critic that reads the policy's states."""

    def read(self, hidden: Tensor) -> Tensor:
        """Return values `[…]` of hidden states `[…, hidden]`."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return its weights, none of which are the policy's."""
        ...


class ValueHead(nn.Module):
    """Linear, tanh, linear to one value. The last layer starts at zero: a new critic predicts 0.

    Args:
        hidden_size: Width of the states.
        width: Width of the layer in between; that of the states by default.
    """

    def __init__(self, hidden_size: int, *, width: int | None = None) -> None:
        super().__init__()
        width = width or hidden_size
        self.layers = nn.Sequential(nn.Linear(hidden_size, width), nn.Tanh(), nn.Linear(width, 1))
        nn.init.zeros_(self.layers[2].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.layers[2].bias)  # type: ignore[arg-type]

    def forward(self, hidden: Tensor) -> Tensor:
        """Return float32 values `[…]` of states `[…, hidden]`."""
        weight = self.layers[0].weight
        assert isinstance(weight, Tensor)
        # under autocast too: bfloat16 has three digits, which are too few for a value
        plain = (
            nullcontext() if hidden.is_meta else torch.autocast(hidden.device.type, enabled=False)
        )
        with plain:
            values: Tensor = self.layers(hidden.to(weight.dtype)).float()
        return values.squeeze(-1)
