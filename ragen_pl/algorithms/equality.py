"""Equal values: rounding decides no advantage.

Returns that were added up in another order differ in their last bits, which a division by their deviation would turn
into advantages.
"""

from __future__ import annotations

import torch
from torch import Tensor

EQUAL = 1e-6
"""Values that differ by at most this fraction of the largest count as equal."""


def agree(high: Tensor, low: Tensor) -> Tensor:
    """Return whether the highest and the lowest of some values count as equal, bool of their shape.

    >>> agree(torch.tensor([0.7, 0.7]), torch.tensor([0.69999993, 0.6999]))
    tensor([ True, False])
    """
    return high - low <= EQUAL * torch.maximum(high.abs(), low.abs())


def sums_of(rewards: Tensor) -> Tensor:
    """Return the sum of each row, the same for the same numbers in any order, and 0 where they cancel but for rounding.

    Args:
        rewards: `[rows, columns]`.

    >>> sums_of(torch.tensor([[0.1, 0.2, -0.3], [-0.3, 0.2, 0.1], [0.1, 0.2, 0.0]]))
    tensor([0.0000, 0.0000, 0.3000])
    """
    exact = rewards.double()
    total = exact.sum(1)
    return torch.where(total.abs() <= EQUAL * exact.abs().sum(1), 0.0, total).to(rewards.dtype)


def agree_within(values: Tensor, sets: Tensor) -> Tensor:
    """Return for each value whether all values of its set count as equal.

    Args:
        values: `[values]`.
        sets: int64 `[values]`, equal for the values of a set.

    Returns:
        bool `[values]`.

    >>> agree_within(torch.tensor([2.0, 1.0, 2.0, 3.0]), torch.tensor([0, 1, 0, 1]))
    tensor([ True, False,  True, False])
    """
    number = torch.unique(sets, return_inverse=True)[1]
    count = int(number.max()) + 1 if len(number) else 0
    high = values.new_full((count,), -torch.inf).scatter_reduce(0, number, values, "amax")
    low = values.new_full((count,), torch.inf).scatter_reduce(0, number, values, "amin")
    return agree(high, low)[number]
