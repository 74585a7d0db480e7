"""Step advantages from the distance to the goal in the graph of states that a group has visited (GraphGPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.gigpo import anchor_groups
from ragen_pl.algorithms.advantages.group import dr_grpo, grpo
from ragen_pl.algorithms.credit import AdvantageInputs, Advantages, Estimator, broadcast_turns
from ragen_pl.algorithms.whitening import AllReduce
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Fraction, NonNegative


def goal_distances(
    state: Tensor, final_state: Tensor, success: Tensor, group: Tensor, turns: Tensor
) -> Tensor:
    """Return the number of turns that the group needed at least from the state after each turn to the goal.

    The nodes of a group's graph are its states, the edges its turns. The last turn of a solved episode leads to the
    goal. An unknown state is a node of its own. From a node that does not lead to the goal the distance is the largest
    other one of the group plus 1.

    Args:
        state: int64 `[trajectories, turns]`, -1 where it is unknown and beyond the last turn.
        final_state: int64 `[trajectories]`, state after the last turn, -1 where it is unknown.
        success: Bool `[trajectories]`, whether the episode ended at the goal.
        group: int64 `[trajectories]`.
        turns: int64 `[trajectories]`, number of turns.

    Returns:
        int64 `[trajectories, turns]`; 0 beyond the last turn, -1 in a group that has not reached the goal.

    >>> state, none = torch.tensor([[0, 1], [0, 0]]), torch.tensor([-1, -1])
    >>> goal_distances(state, none, torch.tensor([True, False]), torch.tensor([0, 0]), torch.tensor([2, 2]))
    tensor([[1, 0],
            [2, 3]])
    """
    if not state.numel():
        return torch.zeros_like(state)
    after = torch.cat([state, torch.full_like(state[:, :1], -1)], dim=1)
    place = torch.arange(after.shape[1], device=state.device).expand_as(after)
    ends = place == turns[:, None]
    after = torch.where(ends, final_state[:, None], after)
    # unknown states have negative numbers of their own, below that of no state
    alone = -2 - torch.arange(after.numel(), device=state.device).view_as(after)
    keys = torch.stack([group[:, None].expand_as(after), torch.where(after < 0, alone, after)], -1)
    nodes, node = torch.unique(keys.flatten(0, 1), dim=0, return_inverse=True)
    node, goal = node.view_as(after), len(nodes)
    node = torch.where(ends & success[:, None], goal, node)
    is_turn = place[:, :-1] < turns[:, None]
    source, target = node[:, :-1][is_turn], node[:, 1:][is_turn]
    unreached = goal + 1
    distance = torch.full((goal + 1,), unreached, device=state.device)
    distance[goal] = 0
    while True:
        shorter = distance.scatter_reduce(0, source, distance[target] + 1, reduce="amin")
        if torch.equal(shorter, distance):
            break
        distance = shorter
    found = torch.where(distance[node] < unreached, distance[node], -1)
    same = group[:, None] == group[None, :]
    farthest = torch.where(same, found.amax(1)[None, :], -1).amax(1)
    reached = (same & success[None, :]).any(1)
    following = torch.where(found < 0, farthest[:, None] + 1, found)[:, 1:]
    return torch.where(is_turn, torch.where(reached[:, None], following, -1), 0)


def graphgpo(
    returns: Tensor,
    distance: Tensor,
    state: Tensor,
    group: Tensor,
    *,
    omega: float,
    step_weight: float,
    episode_weight: float = 1.0,
    goal_reward: float = 1.0,
    counts_turn: bool = False,
    scale_by_std: bool = True,
) -> Tensor:
    """Add the advantages of the episode and of the step in the graph of states (GraphGPO; Cheng et al., 2026, eq. 4).

    `A(i, k) = episode_weight A_episode(i) + step_weight A_step(i, k)`: the return of the episode relative to its
    group's, and `goal_reward omega^d` of the state that the turn leads to, with d turns to the goal, relative to those
    of the group's turns from the same state. A shortest path of visited turns is one that can be repeated, so the step
    advantage is right where environments are deterministic.

    Args:
        returns: `[trajectories]`.
        distance: int64 `[trajectories, turns]`, see `goal_distances`.
        state: int64 `[trajectories, turns]`, -1 where it is unknown and beyond the last turn.
        group: int64 `[trajectories]`.
        omega: Discount per turn to the goal.
        step_weight: Weight of the step advantage.
        episode_weight: Weight of the advantage of the episode.
        goal_reward: Worth of the goal.
        counts_turn: Whether d counts the turn itself, as in the paper's equation; the authors' code begins after it.
        scale_by_std: Divide both advantages by the deviation (GRPO) or only center them (Dr. GRPO).

    Returns:
        float32 `[trajectories, turns]`. In groups that have not reached the goal, in unknown states and beyond the
        last turn it is the advantage of the episode alone.

    >>> distance, state = torch.tensor([[1, 0], [2, 3]]), torch.tensor([[0, 1], [0, 2]])
    >>> settings = {"omega": 0.5, "step_weight": 1.0, "episode_weight": 0.0, "scale_by_std": False}
    >>> graphgpo(torch.tensor([1.0, 0.0]), distance, state, torch.tensor([0, 0]), **settings)
    tensor([[ 0.1250,  0.0000],
            [-0.1250,  0.0000]])
    """
    relative = grpo if scale_by_std else dr_grpo
    compared = (state >= 0) & (distance >= 0)
    worth = goal_reward * torch.as_tensor(omega, dtype=torch.float64) ** (distance + counts_turn)
    steps = torch.zeros(state.shape, dtype=torch.float32, device=state.device)
    anchors = anchor_groups(torch.where(compared, state, -1), group)
    steps[compared] = relative(worth.to(state.device)[compared], anchors).float()
    episode = relative(returns, group)[:, None]
    return (episode_weight * episode + step_weight * steps).float()


@checked
@dataclass(frozen=True, kw_only=True)
class GraphRelative(Estimator):
    """The episode against its group, and each turn by how near to the goal it leads in the graph of visited states.

    A turn that does not advance, such as a summary, stays in its state. It is no step that others are compared with.

    Attributes:
        omega: Discount per turn to the goal.
        step_weight: Weight of the step advantage.
        scale_by_std: Divide both advantages by their deviations.
    """

    needs_trust = ()

    needs_groups: ClassVar[bool] = True
    needs_states: ClassVar[bool] = True
    needs_success: ClassVar[bool] = True
    omega: Fraction = 0.95
    step_weight: NonNegative = 1.0
    scale_by_std: bool = True

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `graphgpo` to the returns and the states.

        Raises:
            ValueError: The environment says of no episode whether the task was solved.
        """
        state = inputs.need_states(self)
        success = inputs.need_success(self, all_reduce=all_reduce)
        final = torch.full_like(inputs.group, -1)
        if inputs.final_state is not None:
            final = inputs.final_state
        distance = goal_distances(state, final, success, inputs.group, inputs.turns)
        steps = state
        if inputs.advances is not None:
            steps = torch.where(inputs.advances[:, : state.shape[1]], state, -1)
        of_turn = graphgpo(
            inputs.returns,
            distance,
            steps,
            inputs.group,
            omega=self.omega,
            step_weight=self.step_weight,
            scale_by_std=self.scale_by_std,
        )
        return broadcast_turns(of_turn, inputs)
