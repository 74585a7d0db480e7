"""Group-in-group advantages: the episode against its group, and each step against steps from the same state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.group import dr_grpo, grpo
from ragen_pl.algorithms.credit import Advantages, Credit, Estimator, broadcast
from ragen_pl.algorithms.scan import reverse_scan
from ragen_pl.algorithms.whitening import AllReduce
from ragen_pl.constraints import Fraction, NonNegative, checked


def step_returns(turn_rewards: Tensor, *, gamma: float) -> Tensor:
    """Sum the rewards from each turn on, discounted per turn.

    Args:
        turn_rewards: `[trajectories, turns]`, 0 beyond the last turn.
        gamma: discount per turn.

    >>> step_returns(torch.tensor([[0.0, 1.0, 2.0]]), gamma=0.5)
    tensor([[1., 2., 2.]])
    """
    rewards = turn_rewards.float()
    return reverse_scan(rewards, decay=torch.full_like(rewards, gamma))


def anchor_groups(state: Tensor, group: Tensor) -> Tensor:
    """Number the sets of steps that were taken from the same state within a group.

    Args:
        state: int64 `[trajectories, turns]`, equal where the states are; -1 beyond the last turn.
        group: int64 `[trajectories]`.

    Returns:
        int64 `[steps]` for the steps with a state, row by row.

    >>> anchor_groups(torch.tensor([[7, 8], [7, -1], [7, 7]]), torch.tensor([0, 0, 1])).tolist()
    [0, 1, 0, 2, 2]
    """
    known = state >= 0
    pairs = torch.stack([group[:, None].expand_as(state)[known], state[known]], dim=1)
    return torch.unique(pairs, dim=0, return_inverse=True)[1]


def gigpo(
    returns: Tensor,
    group: Tensor,
    turn_rewards: Tensor,
    state: Tensor,
    *,
    gamma: float,
    step_weight: float,
    scale_by_std: bool = True,
) -> Tensor:
    """Add the advantage of the episode and that of the step (GiGPO; Feng et al., 2025, eqs. 3, 7 and 8).

    `A(i, k) = A_episode(i) + step_weight A_step(i, k)`: the return of the episode relative to its group's,
    and the discounted return from turn k on relative to those of all steps that the group took from
    the same state. A state that occurs once has no step advantage.

    Args:
        returns: `[trajectories]`.
        group: int64 `[trajectories]`.
        turn_rewards: `[trajectories, turns]`, 0 beyond the last turn.
        state: int64 `[trajectories, turns]`, -1 where it is unknown and beyond the last turn.
        gamma: discount per turn of the step returns.
        step_weight: weight of the step advantage.
        scale_by_std: divide both by the deviation (GRPO) or only center them (Dr. GRPO).

    Returns:
        float32 `[trajectories, turns]`. Turns of unknown states, and those beyond the last one, have the advantage of
        the episode alone.

    >>> rewards, state = torch.tensor([[0.0, 2.0], [0.0, 0.0]]), torch.tensor([[5, 6], [5, 7]])
    >>> settings = {"gamma": 0.5, "step_weight": 1.0, "scale_by_std": False}
    >>> gigpo(rewards.sum(1), torch.tensor([0, 0]), rewards, state, **settings)
    tensor([[ 1.5000,  1.0000],
            [-1.5000, -1.0000]])
    """
    relative = grpo if scale_by_std else dr_grpo
    known = state >= 0
    steps = torch.zeros_like(turn_rewards, dtype=torch.float32)
    from_here = step_returns(turn_rewards, gamma=gamma)[known]
    steps[known] = relative(from_here, anchor_groups(state, group))
    episode = relative(returns, group)[:, None]
    return episode + step_weight * steps


@checked
@dataclass(frozen=True, kw_only=True)
class GroupInGroup(Estimator):
    """The episode against its group, and each turn against turns from the same state (GiGPO).

    Attributes:
        gamma: discount per turn of the step returns.
        step_weight: weight of the step advantage.
        scale_by_std: divide both advantages by their deviation.
    """

    needs_groups: ClassVar[bool] = True
    needs_states: ClassVar[bool] = True
    gamma: Fraction = 0.95
    step_weight: NonNegative = 1.0
    scale_by_std: bool = True

    def __call__(self, credit: Credit, *, all_reduce: AllReduce | None = None) -> Advantages:
        """Apply `gigpo` to the returns and to the rewards of the turns."""
        if credit.state is None:
            raise ValueError(
                "found no anchor states, expected those of the environment's state_key(); GroupInGroup compares "
                "turns from the same state: choose an environment that has it, or algorithm=grpo"
            )
        state, turn = credit.state, credit.turn.clamp(min=0)
        turn_rewards = torch.zeros(state.shape, device=state.device)
        inside = torch.where(credit.turn >= 0, credit.rewards.float(), 0.0)
        if state.shape[1]:
            turn_rewards = turn_rewards.scatter_add(1, turn, inside)
        of_turn = gigpo(
            credit.returns,
            credit.group,
            turn_rewards,
            state,
            gamma=self.gamma,
            step_weight=self.step_weight,
            scale_by_std=self.scale_by_std,
        )
        of_token = of_turn.gather(1, turn) if state.shape[1] else torch.zeros_like(inside)
        result = broadcast(credit.returns, credit)
        result.advantages = torch.where(credit.loss_mask, of_token, 0.0)
        return result
