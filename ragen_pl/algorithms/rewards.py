"""Putting turn rewards on tokens; how large a reward is was settled in the rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from ragen_pl.algorithms.turns import turn_ends


def place_turn_rewards(turn_rewards: Tensor, turn: Tensor, advantage_mask: Tensor) -> Tensor:
    """Put each turn's reward on the turn's last token inside the advantage mask.

    Args:
        turn_rewards: `[trajectories, turns]`, padded with 0.
        turn: int64 `[trajectories, tokens]`, not decreasing along a row; -1 off the mask.
        advantage_mask: bool `[trajectories, tokens]`.

    Returns:
        float32 `[trajectories, tokens]`.

    Raises:
        ValueError: a turn with a reward has no token inside the mask, or a token's turn index has
            no column in `turn_rewards`.

    >>> turn = torch.tensor([[0, 0, 1, 1]])
    >>> mask = torch.tensor([[True, True, True, False]])
    >>> place_turn_rewards(torch.tensor([[0.5, 1.0]]), turn, mask)
    tensor([[0.0000, 0.5000, 1.0000, 0.0000]])
    """
    turns = turn_rewards.shape[1]
    if turn.numel() and int(turn.max()) >= turns:
        raise ValueError(
            f"found turn index {int(turn.max())} in turn, expected below {turns}, the columns of "
            "turn_rewards; pad turn_rewards with zeros to the longest trajectory"
        )
    ends = turn_ends(torch.where(advantage_mask.bool(), turn, -1))
    if not turns:
        return torch.zeros(turn.shape, dtype=torch.float32, device=turn.device)
    placed = turn_rewards.float().gather(1, turn.clamp(min=0))
    _check_nothing_swallowed(turn_rewards, turn, ends)
    return torch.where(ends, placed, 0.0)


def _check_nothing_swallowed(turn_rewards: Tensor, turn: Tensor, ends: Tensor) -> None:
    # One spare column takes the tokens that end no turn, so that no index has to be left out.
    turns = turn_rewards.shape[1]
    held = torch.zeros(turn.shape[0], turns + 1, dtype=torch.bool, device=turn.device)
    spare = torch.full_like(turn, turns)
    held.scatter_(1, torch.where(ends, turn, spare), True)
    lost = ((turn_rewards != 0) & ~held[:, :-1]).nonzero()
    if len(lost):
        row, which = lost[0].tolist()
        raise ValueError(
            f"found reward {turn_rewards[row, which].item():g} in turn {which} of trajectory "
            f"{row}, which has no token inside advantage_mask, expected at least one (no mask may "
            "swallow a reward); let a turn whose mask would be empty keep all its sampled tokens"
        )
