"""GAE over turns, with the returns of a group's other visits of a state as its value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.gigpo import (
    anchor_groups,
    expected_rest,
    mean_of_others,
    step_returns,
)
from ragen_pl.algorithms.credit import AdvantageInputs, Advantages, Estimator, broadcast_turns
from ragen_pl.algorithms.equality import agree
from ragen_pl.algorithms.scan import reverse_scan
from ragen_pl.algorithms.whitening import AllReduce
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Fraction


def state_values(
    turn_rewards: Tensor, state: Tensor, group: Tensor, *, gamma: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return the mean discounted return of the group's other episodes from the state that a turn starts in.

    The own episode is left out: the value depends neither on the turn's action nor on how often the episode comes back.

    Args:
        turn_rewards: `[trajectories, turns]`, 0 beyond the last turn.
        state: int64 `[trajectories, turns]`, -1 where it is unknown and beyond the last turn.
        group: int64 `[trajectories]`.
        gamma: Discount per turn; `[trajectories, turns]` where it varies.

    Returns:
        Values, float64 `[trajectories, turns]`, and whether another episode has visited the state, bool. Where none
        has, the value is the mean return of the other episodes less the own rewards before the turn, 0 in a group of
        one.

    >>> rewards, state = torch.tensor([[0.0, 2.0], [0.0, 1.0]]), torch.tensor([[5, 6], [5, 7]])
    >>> state_values(rewards, state, torch.tensor([0, 0]), gamma=0.5)[0].tolist()
    [[0.5, 1.0], [1.0, 2.0]]
    """
    known = state >= 0
    values = torch.full(state.shape, torch.nan, dtype=torch.float64, device=state.device)
    values[known] = mean_of_others(
        step_returns(turn_rewards, gamma=gamma)[known],
        anchor_groups(state, group),
        episode=known.nonzero()[:, 0],
        fallback=values[known],
    )
    visited = ~values.isnan()
    rest = expected_rest(turn_rewards, group).nan_to_num(0.0)
    return torch.where(visited, values, rest), visited


def group_gae(
    turn_rewards: Tensor,
    state: Tensor,
    group: Tensor,
    turns: Tensor,
    *,
    gamma: float | Tensor,
    lam: float | Tensor,
) -> Tensor:
    """Estimate GAE over turns with the values of `state_values`, and no critic.

    `delta_k = r_k + gamma V(s_{k+1}) - V(s_k)`, where V is 0 after the last turn, and `A_k = delta_k + gamma lam_k
    A_{k+1}`. With `lam=1` it is the return from the turn on less the mean of other visits, the step advantage of GiGPO
    without its biases. Less lets the returns of other episodes stand for what has followed in the own one. Where no
    other episode has visited the next state, lam_k is 1: its value would be that of no state. A delta of values that
    are equal but for rounding is 0.

    Args:
        turn_rewards: `[trajectories, turns]`, 0 beyond the last turn.
        state: int64 `[trajectories, turns]`, -1 where it is unknown and beyond the last turn.
        group: int64 `[trajectories]`.
        turns: int64 `[trajectories]`, number of turns.
        gamma: Discount per turn; `[trajectories, turns]` where it varies.
        lam: Decay of the trace per turn, likewise.

    Returns:
        float32 `[trajectories, turns]`, 0 beyond the last turn.

    >>> rewards, state = torch.tensor([[0.0, 2.0], [0.0, 1.0]]), torch.tensor([[5, 6], [5, 6]])
    >>> group_gae(rewards, state, torch.tensor([0, 0]), torch.tensor([2, 2]), gamma=1.0, lam=0.0)
    tensor([[ 0.,  1.],
            [ 0., -1.]])
    """
    values, visited = state_values(turn_rewards, state, group, gamma=gamma)
    place = torch.arange(values.shape[1], device=turns.device).expand_as(values)
    inside = place < turns[:, None]
    values = torch.where(inside, values, 0.0)
    following = torch.nn.functional.pad(values[:, 1:], (0, 1))
    bootstraps = torch.nn.functional.pad(visited[:, 1:], (0, 1))
    discount = torch.as_tensor(gamma, dtype=torch.float64, device=values.device)
    reached = turn_rewards.double() + discount * following
    equal = agree(torch.maximum(reached, values), torch.minimum(reached, values))
    delta = torch.where(inside & ~equal, reached - values, 0.0)
    decay = torch.where(bootstraps, discount * lam, discount.expand_as(values))
    return torch.where(inside, reverse_scan(delta.float(), decay=decay.float()), 0.0)


@checked
@dataclass(frozen=True, kw_only=True)
class GroupGAE(Estimator):
    """GAE over turns whose values are the mean returns of the group's other visits of a state (GAGPO).

    Turns that do not advance have `gamma = lam = 1`.

    Attributes:
        gamma: Discount per turn.
        lam: Decay of the trace per turn.
    """

    needs_trust = ()

    needs_groups: ClassVar[bool] = True
    needs_states: ClassVar[bool] = True
    gamma: Fraction = 0.95
    lam: Fraction = 0.95

    @property
    def turn_discount(self) -> float | None:
        """The discount per turn."""
        return self.gamma

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `group_gae` to the rewards of the turns."""
        state = inputs.need_states(self)
        settings = {
            name: inputs.at_turns(value, turns=state.shape[1])
            for name, value in (("gamma", self.gamma), ("lam", self.lam))
        }
        of_turn = group_gae(
            inputs.turn_rewards(state.shape[1]), state, inputs.group, inputs.turns, **settings
        )
        return broadcast_turns(of_turn, inputs)
