"""The linear recurrence behind every return, in log2(tokens) passes over the whole batch.

Functions here know neither turns (see `turns`) nor rewards and values (see `advantages`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def reverse_scan(x: Tensor, *, decay: Tensor) -> Tensor:
    """Accumulate from the right: `y_t = x_t + decay_t * y_{t+1}`, with `y` after the end 0.

    A decay of 0 restarts the sum, a decay of 1 with `x_t = 0` steps over token t. The recurrence is
    solved by doubling (Hillis and Steele, 1986), so a row of T tokens needs log2(T) tensor passes
    and no loop over time.

    Args:
        x: `[rows, time]`, floating.
        decay: `[rows, time]`, same dtype.

    Returns:
        `[rows, time]`.

    >>> reverse_scan(torch.tensor([[1.0, 1.0, 1.0]]), decay=torch.tensor([[0.5, 0.5, 0.5]]))
    tensor([[1.7500, 1.5000, 1.0000]])
    """
    y, carry, step = x.clone(), decay.clone(), 1
    while step < x.shape[1]:
        # Out of place on the right-hand side: each pass must read the pass before.
        y[:, :-step] += carry[:, :-step] * y[:, step:]
        complete = torch.zeros_like(carry[:, -step:])
        carry = torch.cat([carry[:, :-step] * carry[:, step:], complete], dim=1)
        step *= 2
    return y


def next_on_mask(x: Tensor, *, mask: Tensor, last: Tensor) -> Tensor:
    """Read `x` at the next token inside the mask; `last` where there is none.

    Args:
        x: `[rows, time]`.
        mask: Bool `[rows, time]`.
        last: `[rows]`, what follows the last token inside the mask.

    Returns:
        `[rows, time]`.

    >>> mask = torch.tensor([[True, False, True]])
    >>> next_on_mask(torch.tensor([[1.0, 2.0, 3.0]]), mask=mask, last=torch.tensor([9.0]))
    tensor([[3., 3., 9.]])
    """
    padded = torch.cat([x, last[:, None].to(x.dtype)], dim=1)
    return padded.gather(1, next_index(mask))


def next_index(mask: Tensor) -> Tensor:
    """Find the index of the next token inside the mask, strictly after each token.

    Args:
        mask: Bool `[rows, time]`.

    Returns:
        int64 `[rows, time]`; `time` where no token of the mask follows.

    >>> next_index(torch.tensor([[True, False, True]]))
    tensor([[2, 2, 3]])
    """
    here = index_from(mask)
    return torch.cat([here[:, 1:], torch.full_like(here[:, :1], mask.shape[1])], dim=1)


def index_from(mask: Tensor) -> Tensor:
    """Find the index of the first token inside the mask at or after each token.

    Args:
        mask: Bool `[rows, time]`.

    Returns:
        int64 `[rows, time]`; `time` where no token of the mask follows.

    >>> index_from(torch.tensor([[True, False, True]]))
    tensor([[0, 2, 2]])
    """
    time = mask.shape[1]
    here = torch.arange(time, device=mask.device).expand_as(mask)
    return torch.where(mask, here, time).flip(1).cummin(1).values.flip(1)
