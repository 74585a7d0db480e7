"""Rows split into microbatches, which are computed together.

Rows of similar length share a microbatch, so little is computed on padding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ragen_pl.base.distributed import max_over_ranks

# fraction of padding below which one more microbatch costs more than it saves
_LITTLE_PADDING = 0.05
# of a forward pass with a gradient, and of one without; a GPU computes padding sooner than it launches another pass
_BUCKETS = {"cpu": 6}
_SCORING_BUCKETS = {"cpu": 8}


def default_buckets(device: torch.device) -> int:
    """Return the largest number of passes that the rows of a minibatch are split into by length on a device."""
    return _BUCKETS.get(device.type, 1)


def split_by_length(lengths: Tensor, buckets: int) -> list[Tensor]:
    """Split rows into at most `buckets` microbatches with the least padding in total.

    Dynamic programming over the distinct lengths. The cost of a microbatch is its number of rows times its longest
    length. Fewer microbatches are made where they already leave little padding.

    Examples:
        >>> [rows.tolist() for rows in split_by_length(torch.tensor([9, 2, 8, 2]), 2)]
        [[1, 3], [2, 0]]
    """
    order = torch.argsort(lengths, stable=True)
    unique, counts = np.unique(lengths.cpu().numpy(), return_counts=True)
    kinds, max_count = len(unique), min(buckets, len(unique))
    before = np.concatenate([[0], np.cumsum(counts)])
    cost = np.full((max_count + 1, kinds + 1), np.inf)
    cost[0, 0] = 0
    first = np.zeros((max_count + 1, kinds + 1), dtype=np.int64)
    for number in range(1, max_count + 1):
        for end in range(1, kinds + 1):
            totals = cost[number - 1, :end] + (before[end] - before[:end]) * unique[end - 1]
            first[number, end] = int(totals.argmin())
            cost[number, end] = totals[first[number, end]]
    little = cost[:, kinds] * (1.0 - _LITTLE_PADDING) <= int(lengths.sum())
    microbatches, end = [], kinds
    for number in range(int(little.argmax()) or max_count, 0, -1):
        start = int(first[number, end])
        microbatches.append(order[int(before[start]) : int(before[end])])
        end = start
    return [rows for rows in reversed(microbatches) if len(rows)]


def split_by_tokens(lengths: Tensor, tokens: int) -> list[Tensor]:
    """Split rows, shortest first, into microbatches of at most `tokens` positions with padding."""
    order = torch.argsort(lengths, stable=True)
    microbatches, start = [], 0
    longest = lengths[order].tolist()
    for end in range(1, len(order) + 1):
        full = end < len(order) and (end - start + 1) * longest[end] > tokens
        if full or end == len(order):
            microbatches.append(order[start:end])
            start = end
    return microbatches


def split_for_scoring(lengths: Tensor, tokens: int) -> list[Tensor]:
    """Split rows into few length buckets with little padding, and these into microbatches of at most `tokens`.

    Args:
        lengths: int64 `[rows]`, on the device that computes them. On a GPU the limit alone splits the rows.
        tokens: Limit of a microbatch's positions, padding included; a longer row is alone.

    Examples:
        >>> [rows.tolist() for rows in split_for_scoring(torch.tensor([9, 2, 9, 2]), 9)]
        [[1, 3], [0], [2]]
    """
    return [
        rows[part]
        for rows in split_by_length(lengths, _SCORING_BUCKETS.get(lengths.device.type, 1))
        for part in split_by_tokens(lengths[rows], tokens)
    ]


def with_equal_count(microbatches: list[Tensor]) -> list[Tensor]:
    """Repeat a row as further microbatches until all ranks have as many. All ranks must call it.

    Strategies that shard the weights wait for each other in every forward pass. The repeated row is computed for
    nothing, so this is for forward passes without a gradient. A rank without microbatches repeats row 0.
    """
    count = int(max_over_ranks(torch.tensor(len(microbatches))))
    row = microbatches[0][:1] if microbatches else torch.zeros(1, dtype=torch.int64)
    return microbatches + [row] * (count - len(microbatches))


def split_into(lengths: Tensor, count: int, *, tokens: int) -> list[Tensor]:
    """Split rows into `count` microbatches of at most `tokens` positions with padding.

    The largest microbatches of `split_by_tokens` are halved until there are enough; the last ones are empty where
    there are fewer rows.

    Args:
        lengths: int64 `[rows]`.
        count: Number of microbatches, at least as many as `split_by_tokens` needs.
        tokens: Limit of a microbatch; a longer row is alone.

    Examples:
        >>> [rows.tolist() for rows in split_into(torch.tensor([2, 2, 4]), 3, tokens=8)]
        [[0], [1], [2]]
    """
    microbatches = split_by_tokens(lengths, tokens) if len(lengths) else []

    def positions(number: int) -> int:
        rows = microbatches[number]
        return len(rows) * int(lengths[rows[-1]]) if len(rows) > 1 else 0

    while len(microbatches) < min(count, len(lengths)):
        largest = max(range(len(microbatches)), key=positions)
        rows = microbatches[largest]
        microbatches[largest : largest + 1] = rows.tensor_split(2)
    return microbatches + [lengths.new_zeros(0)] * (count - len(microbatches))
