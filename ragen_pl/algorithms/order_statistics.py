"""The smallest of the largest values over all ranks, without gathering values.

Radix selection: the 32 bits of a float, put in the order of its values, are fixed eight at a time, the highest first.
A round counts the values that have the bits fixed so far, by their next eight bits, and adds the counts up over the
ranks. The value is exact. A rank receives five small tensors, whatever the number of values and ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragen_pl.algorithms.whitening import AllReduce

_DIGIT_BITS = 8
_DIGIT_VALUES = 1 << _DIGIT_BITS
# of float32; set for negative numbers
_SIGN = 1 << 31


def smallest_of_top(
    values: Tensor, *, fraction: float, all_reduce: AllReduce | None = None
) -> float | None:
    """Return the smallest of the largest values, None if there are no values.

    Args:
        values: `[values]` of this rank, compared as float32. NaN counts as the largest.
        fraction: Fraction of the values of all ranks to count among the largest; one value at least.
        all_reduce: Sums a tensor over the ranks; None on one rank.

    >>> smallest_of_top(torch.tensor([4.0, -1.0, 3.0, 2.0]), fraction=0.5)
    3.0
    """
    keys = _ordered(values)
    total = int(_summed(torch.tensor([len(keys)], device=keys.device), all_reduce))
    if not total:
        return None
    left, found = max(1, round(fraction * total)), 0
    for shift in range(32 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        digits = (keys >> shift) % _DIGIT_VALUES
        counts = _summed(torch.bincount(digits, minlength=_DIGIT_VALUES), all_reduce)
        at_least = counts.flip(0).cumsum(0).flip(0)
        digit = int((at_least >= left).nonzero().max())
        left -= int(at_least[digit] - counts[digit])
        keys = keys[digits == digit]
        found = (found << _DIGIT_BITS) + digit
    return _value(found)


def _summed(counts: Tensor, all_reduce: AllReduce | None) -> Tensor:
    return counts if all_reduce is None else all_reduce(counts)


def _ordered(values: Tensor) -> Tensor:
    """Return int64 from 0 to 2^32 - 1 in the order of the values."""
    bits = values.float().contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -1 - bits, bits + _SIGN)


def _value(key: int) -> float:
    """Return the value of a number of `_ordered`."""
    bits = key - _SIGN if key >= _SIGN else -1 - key
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32).item()
