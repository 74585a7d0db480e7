"""Group-in-group advantages: the episode against its group, and each step against steps from the same state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.group import dr_grpo, grpo, rloo
from ragen_pl.algorithms.credit import AdvantageInputs, Advantages, Estimator, broadcast_turns
from ragen_pl.algorithms.equality import agree, sums_of
from ragen_pl.algorithms.scan import reverse_scan
from ragen_pl.algorithms.whitening import AllReduce
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Fraction, NonNegative


def step_returns(turn_rewards: Tensor, *, gamma: float | Tensor) -> Tensor:
    """Sum the rewards from each turn on, discounted per turn.

    Args:
        turn_rewards: `[trajectories, turns]`, 0 beyond the last turn.
        gamma: Discount per turn; `[trajectories, turns]` where it varies.

    >>> step_returns(torch.tensor([[0.0, 1.0, 2.0]]), gamma=0.5)
    tensor([[1., 2., 2.]])
    """
    # in float32 the order of the rewards would show in the last bits
    rewards = turn_rewards.double()
    return reverse_scan(rewards, decay=torch.ones_like(rewards) * gamma).float()


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


class StepBaseline(StrEnum):
    """Visits of a state that a step is compared with: those of other trajectories, or all of the group."""

    OTHERS = "others"
    ALL = "all"


def gigpo(
    returns: Tensor,
    group: Tensor,
    turn_rewards: Tensor,
    state: Tensor,
    *,
    gamma: float | Tensor,
    step_weight: float,
    scale_by_std: bool = True,
    step_baseline: StepBaseline = StepBaseline.OTHERS,
    scale_steps: bool = False,
) -> Tensor:
    """Add the advantage of the episode and that of the step (GiGPO; Feng et al., 2025, eqs. 3, 7 and 8).

    `A(i, k) = A_episode(i) + step_weight A_step(i, k)`: the return of the episode relative to its group's,
    and the discounted return from turn k on relative to those of steps that the group took from the same state.

    The published method compares with all of these steps and divides by their deviation (`StepBaseline.ALL` and
    `scale_steps`). How often a trajectory comes back to a state is its own choice, so a mean with its own later visits
    in it rewards or punishes going on, and the division by the deviation is biased as well. `StepBaseline.OTHERS`
    takes the mean over other trajectories' visits, which is unbiased; see `relative_to_others`.

    Args:
        returns: `[trajectories]`.
        group: int64 `[trajectories]`.
        turn_rewards: `[trajectories, turns]`, 0 beyond the last turn.
        state: int64 `[trajectories, turns]`, -1 where it is unknown and beyond the last turn.
        gamma: Discount per turn of the step returns; `[trajectories, turns]` where it varies.
        step_weight: Weight of the step advantage.
        scale_by_std: Divide the advantage of the episode by the deviation (GRPO) or only center it (Dr. GRPO).
        step_baseline: Steps that a step is compared with.
        scale_steps: Divide the advantage of the step by the deviation, with `StepBaseline.ALL`.

    Returns:
        float32 `[trajectories, turns]`. Turns of unknown states, and those beyond the last one, have the advantage of
        the episode alone.

    >>> rewards, state = torch.tensor([[0.0, 2.0], [0.0, 0.0]]), torch.tensor([[5, 6], [5, 6]])
    >>> settings = {"gamma": 0.5, "step_weight": 1.0, "scale_by_std": False}
    >>> gigpo(rewards.sum(1), torch.tensor([0, 0]), rewards, state, **settings)
    tensor([[ 2.,  3.],
            [-2., -3.]])
    """
    known = state >= 0
    steps = torch.zeros_like(turn_rewards, dtype=torch.float32)
    from_here, anchors = step_returns(turn_rewards, gamma=gamma), anchor_groups(state, group)
    if step_baseline is StepBaseline.ALL:
        relative = grpo if scale_steps else dr_grpo
        steps[known] = relative(from_here[known], anchors)
    else:
        rest = expected_rest(turn_rewards, group)[known]
        steps[known] = relative_to_others(
            from_here[known], anchors, episode=known.nonzero()[:, 0], fallback=rest
        )
    episode = (grpo if scale_by_std else dr_grpo)(returns, group)[:, None]
    return episode + step_weight * steps


def mean_of_others(values: Tensor, anchors: Tensor, *, episode: Tensor, fallback: Tensor) -> Tensor:
    """Return the mean over the steps of other episodes from the same state.

    Args:
        values: `[steps]`, returns from the steps on.
        anchors: int64 `[steps]`, equal for steps from the same state of a group.
        episode: int64 `[steps]`, episode that a step is in.
        fallback: `[steps]`, result for steps from a state that no other episode has visited.

    Returns:
        float64 `[steps]`.

    >>> values, episode = torch.tensor([1.0, 4.0, 2.0, 5.0]), torch.tensor([0, 0, 1, 1])
    >>> mean_of_others(values, torch.tensor([0, 0, 0, 1]), episode=episode, fallback=torch.full((4,), 3.0))
    tensor([2.0000, 2.0000, 2.5000, 3.0000], dtype=torch.float64)
    """
    pairs = torch.unique(torch.stack([anchors, episode], dim=1), dim=0, return_inverse=True)[1]

    def total(of_step: Tensor, sets: Tensor) -> Tensor:
        return torch.zeros_like(of_step).index_add(0, sets, of_step)[sets]

    exact, ones = values.double(), torch.ones_like(values, dtype=torch.float64)
    others = total(ones, anchors) - total(ones, pairs)
    mean = (total(exact, anchors) - total(exact, pairs)) / others.clamp(min=1)
    return torch.where(others > 0, mean, fallback.double())


def relative_to_others(
    values: Tensor, anchors: Tensor, *, episode: Tensor, fallback: Tensor
) -> Tensor:
    """Subtract from each step's return the mean over the steps of other episodes from the same state.

    Args:
        values: `[steps]`, returns from the steps on.
        anchors: int64 `[steps]`, equal for steps from the same state of a group.
        episode: int64 `[steps]`, episode that a step is in.
        fallback: `[steps]`, baseline of steps from a state that no other episode has visited; NaN for none, where the
            advantage is 0.

    Returns:
        float32 `[steps]`, 0 where value and baseline are equal but for rounding.

    >>> values, episode = torch.tensor([1.0, 4.0, 2.0, 5.0]), torch.tensor([0, 0, 1, 1])
    >>> relative_to_others(values, torch.tensor([0, 0, 0, 1]), episode=episode, fallback=torch.full((4,), 3.0))
    tensor([-1.0000,  2.0000, -0.5000,  2.0000])
    """
    exact = values.double()
    baseline = mean_of_others(values, anchors, episode=episode, fallback=fallback)
    equal = agree(torch.maximum(exact, baseline), torch.minimum(exact, baseline))
    return torch.where(equal | baseline.isnan(), 0.0, exact - baseline).float()


def expected_rest(turn_rewards: Tensor, group: Tensor) -> Tensor:
    """Return the mean return of a group's other members less an episode's own rewards before each turn.

    Args:
        turn_rewards: `[trajectories, turns]`, 0 beyond the last turn.
        group: int64 `[trajectories]`.

    Returns:
        float64 `[trajectories, turns]`; NaN for a group of one.

    >>> expected_rest(torch.tensor([[1.0, 2.0], [4.0, 0.0]]), torch.tensor([0, 0])).tolist()
    [[4.0, 3.0], [3.0, -1.0]]
    """
    rewards = turn_rewards.double()
    returns = sums_of(rewards)
    of_others = returns - rloo(returns, group)
    before = rewards.cumsum(1) - rewards
    members = (group[:, None] == group[None, :]).sum(1)
    return torch.where(members > 1, of_others, torch.nan)[:, None] - before


@checked
@dataclass(frozen=True, kw_only=True)
class GroupInGroup(Estimator):
    """The episode against its group, and each turn against turns from the same state (GiGPO).

    `step_baseline=all` with `scale_steps=true` is the published estimator. Turns that do not advance have `gamma = 1`.

    Attributes:
        gamma: Discount per turn of the step returns.
        step_weight: Weight of the step advantage.
        scale_by_std: Divide the advantage of the episode by its deviation.
        step_baseline: Visits of the state that a turn is compared with.
        scale_steps: Divide the step advantage by its deviation.

    Raises:
        ValueError: `scale_steps` without `step_baseline=all`.
    """

    needs_trust = ()

    needs_groups: ClassVar[bool] = True
    needs_states: ClassVar[bool] = True
    gamma: Fraction = 0.95
    step_weight: NonNegative = 1.0
    scale_by_std: bool = True
    step_baseline: StepBaseline = StepBaseline.OTHERS
    scale_steps: bool = False

    def __post_init__(self) -> None:
        if self.scale_steps and self.step_baseline is not StepBaseline.ALL:
            raise ValueError(
                f"algorithm.estimator.scale_steps=true with step_baseline={self.step_baseline}: the deviation is that "
                "of all visits; set step_baseline=all, or scale_steps=false"
            )

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `gigpo` to the returns and to the rewards of the turns."""
        state = inputs.need_states(self)
        of_turn = gigpo(
            inputs.returns,
            inputs.group,
            inputs.turn_rewards(state.shape[1]),
            state,
            gamma=inputs.at_turns(self.gamma, turns=state.shape[1]),
            step_weight=self.step_weight,
            scale_by_std=self.scale_by_std,
            step_baseline=self.step_baseline,
            scale_steps=self.scale_steps,
        )
        return broadcast_turns(of_turn, inputs)
