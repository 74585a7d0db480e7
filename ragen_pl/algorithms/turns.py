"""First, last and nearest tokens of turns, in the credit layout.

Turns are explicit indices per token. They are never guessed from nonzero rewards. `turn` is int64
`[trajectories, tokens]` throughout, not decreasing along a row and -1 off the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragen_pl.algorithms.scan import index_from, next_on_mask, reverse_scan


def turn_ends(turn: Tensor) -> Tensor:
    """Mark each turn's last token.

    Returns:
        bool `[trajectories, tokens]`.

    >>> turn_ends(torch.tensor([[0, 0, -1, 1, -1]]))
    tensor([[False,  True, False,  True, False]])
    """
    sampled = turn >= 0
    following = next_on_mask(turn, mask=sampled, last=torch.full_like(turn[:, 0], -1))
    return sampled & (following != turn)


def turn_starts(turn: Tensor) -> Tensor:
    """Mark each turn's first token.

    Returns:
        bool `[trajectories, tokens]`.

    >>> turn_starts(torch.tensor([[0, 0, -1, 1, -1]]))
    tensor([[ True, False, False,  True, False]])
    """
    return turn_ends(turn.flip(1)).flip(1)


def at_turn_start(x: Tensor, *, turn: Tensor) -> Tensor:
    """Read `x` at the first token of each token's turn.

    Args:
        x: `[trajectories, tokens]`.
        turn: int64 `[trajectories, tokens]`.

    Returns:
        `[trajectories, tokens]`, constant over a turn, 0 off the mask.

    >>> at_turn_start(torch.tensor([[1.0, 2.0, 5.0, 4.0]]), turn=torch.tensor([[0, 0, -1, 1]]))
    tensor([[1., 1., 0., 4.]])
    """
    place = torch.arange(turn.shape[1], device=turn.device).expand_as(turn)
    first = torch.where(turn_starts(turn), place, 0).cummax(dim=1).values
    return torch.where(turn >= 0, x.gather(1, first), 0.0)


def at_turn_end(x: Tensor, *, turn: Tensor) -> Tensor:
    """Read `x` at the last token of each token's turn.

    Args:
        x: `[trajectories, tokens]`.
        turn: int64 `[trajectories, tokens]`.

    Returns:
        `[trajectories, tokens]`, constant over a turn, 0 off the mask.

    >>> at_turn_end(torch.tensor([[1.0, 2.0, 5.0, 4.0]]), turn=torch.tensor([[0, 0, -1, 1]]))
    tensor([[2., 2., 0., 4.]])
    """
    return at_turn_start(x.flip(1), turn=turn.flip(1)).flip(1)


def sum_at_turn_end(x: Tensor, *, turn: Tensor) -> Tensor:
    """Add up `x` over each turn and put the sum at the turn's last token; 0 elsewhere.

    Args:
        x: `[trajectories, tokens]`; values off the mask are not read.
        turn: int64 `[trajectories, tokens]`.

    Returns:
        `[trajectories, tokens]`.

    >>> sum_at_turn_end(torch.tensor([[1.0, 2.0, 5.0, 4.0]]), turn=torch.tensor([[0, 0, -1, 1]]))
    tensor([[0., 3., 0., 4.]])
    """
    inside = torch.where(turn >= 0, x, 0.0).flip(1)
    # Read from the right, a turn's first token comes last: there the running sum restarts.
    carry = (~turn_starts(turn)).to(x.dtype).flip(1)
    running = reverse_scan(inside, decay=carry).flip(1)
    return torch.where(turn_ends(turn), running, 0.0)


def following_in_turn(mask: Tensor, *, turn: Tensor) -> Tensor:
    """Find the first token of the mask at or after each token, within the token's turn.

    Args:
        mask: Bool `[trajectories, tokens]`.
        turn: int64 `[trajectories, tokens]`.

    Returns:
        int64 `[trajectories, tokens]`: an index into the row, -1 where there is none.

    >>> mask, turn = torch.tensor([[False, True, False, False]]), torch.tensor([[0, 0, 0, 1]])
    >>> following_in_turn(mask, turn=turn)
    tensor([[ 1,  1, -1, -1]])
    """
    index = index_from(mask)
    turn_there = torch.cat([turn, torch.full_like(turn[:, :1], -1)], dim=1).gather(1, index)
    return torch.where((turn_there == turn) & (turn >= 0), index, -1)


def nearest_in_turn(mask: Tensor, *, turn: Tensor) -> Tensor:
    """Find the next token of the mask within each token's turn, else the last before it.

    Args:
        mask: Bool `[trajectories, tokens]`.
        turn: int64 `[trajectories, tokens]`.

    Returns:
        int64 `[trajectories, tokens]`: an index into the row, -1 where the turn has no such token.

    >>> mask, turn = torch.tensor([[False, True, False, False]]), torch.tensor([[0, 0, 0, 1]])
    >>> nearest_in_turn(mask, turn=turn)
    tensor([[ 1,  1,  1, -1]])
    """
    after = following_in_turn(mask, turn=turn)
    mirrored = following_in_turn(mask.flip(1), turn=turn.flip(1)).flip(1)
    before = torch.where(mirrored >= 0, mask.shape[1] - 1 - mirrored, -1)
    return torch.where(after >= 0, after, before)
