"""Returns from each turn on against those of the group's other members at the same turn."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.gigpo import relative_to_others, step_returns
from ragen_pl.algorithms.credit import AdvantageInputs, Advantages, Estimator, broadcast_turns
from ragen_pl.algorithms.whitening import AllReduce
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Fraction


class Absent(StrEnum):
    """Treatment of members that had stopped before a turn in its mean: left out, or counted with the return 0."""

    LEFT_OUT = "left_out"
    ZERO = "zero"


def turn_leave_one_out(
    from_here: Tensor, turns: Tensor, group: Tensor, *, absent: Absent = Absent.LEFT_OUT
) -> Tensor:
    """Subtract from each turn's return-to-go the mean of the other members' at the same turn index.

    The baseline depends on other members alone, so the policy gradient is that of the returns. A mean that includes
    the episode itself, or one of rewards that are then added up, depends on how many turns the episode has, which is
    its own choice, and so rewards or punishes going on (verl, issue 7244).

    Args:
        from_here: `[trajectories, turns]`, returns from each turn on; beyond the last turn those without a reward.
        turns: int64 `[trajectories]`, number of turns.
        group: int64 `[trajectories]`.
        absent: How members without such a turn count.

    Returns:
        float32 `[trajectories, turns]`, 0 beyond the last turn. Where no other member counts, the baseline is 0.

    >>> from_here, turns = torch.tensor([[3.0, 1.0], [4.0, 0.0], [2.0, 2.0]]), torch.tensor([2, 1, 2])
    >>> turn_leave_one_out(from_here, turns, torch.zeros(3, dtype=torch.int64))
    tensor([[ 0.0000, -1.0000],
            [ 1.5000,  0.0000],
            [-1.5000,  1.0000]])
    """
    place = torch.arange(from_here.shape[1], device=turns.device).expand_as(from_here)
    reached = place < turns[:, None]
    counted = reached if absent is Absent.LEFT_OUT else torch.ones_like(reached)
    values = from_here.float()[counted]
    sets = torch.stack([group[:, None].expand_as(place)[counted], place[counted]], dim=1)
    result = torch.zeros(from_here.shape, device=from_here.device)
    result[counted] = relative_to_others(
        values,
        torch.unique(sets, dim=0, return_inverse=True)[1],
        episode=counted.nonzero()[:, 0],
        fallback=torch.zeros_like(values),
    )
    return torch.where(reached, result, 0.0)


@checked
@dataclass(frozen=True, kw_only=True)
class TurnLeaveOneOut(Estimator):
    """Returns from each turn on against the mean of the group's other members at the same turn.

    A turn that does not advance has `gamma = 1`.

    Attributes:
        gamma: Discount per turn.
        absent: How members that had stopped before a turn count.
    """

    needs_trust = ()

    needs_groups: ClassVar[bool] = True
    gamma: Fraction = 1.0
    absent: Absent = Absent.LEFT_OUT

    @property
    def turn_discount(self) -> float | None:
        """The discount per turn."""
        return self.gamma

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `turn_leave_one_out` to the rewards of the turns."""
        turns = inputs.turns
        longest = int(turns.max()) if len(turns) else 0
        gamma = inputs.at_turns(self.gamma, turns=longest)
        from_here = step_returns(inputs.turn_rewards(longest), gamma=gamma)
        if inputs.center is not None:
            from_here = from_here - inputs.center[:, None]
        return broadcast_turns(
            turn_leave_one_out(from_here, turns, inputs.group, absent=self.absent), inputs
        )
