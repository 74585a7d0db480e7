"""Turn advantages from a solver's values, added to those of the episode (CAST)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.group import rloo
from ragen_pl.algorithms.credit import AdvantageInputs, Advantages, Estimator, broadcast_turns
from ragen_pl.algorithms.whitening import AllReduce
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import NonNegative

_EPS = 1e-8


def solver_advantages(potential: Tensor, final_potential: Tensor, turns: Tensor) -> Tensor:
    """Return by how much each turn has come nearer to the goal, `Phi(s_{k+1}) - Phi(s_k)`.

    With Phi minus the number N of steps that a solver needs, it is `N(s_k) - N(s_{k+1})`: the advantage under the
    solver's policy in a task where each step costs 1, plus 1, so that a step towards the goal has 1.

    Args:
        potential: `[trajectories, turns]`, Phi of the state that a turn starts in; not read beyond the last turn.
        final_potential: `[trajectories]`, Phi of the state after the last turn, the end of the task included.
        turns: int64 `[trajectories]`, number of turns.

    Returns:
        float32 `[trajectories, turns]`, 0 beyond the last turn.

    >>> potential, final = torch.tensor([[-2.0, -1.0], [-2.0, 0.0]]), torch.tensor([0.0, -3.0])
    >>> solver_advantages(potential, final, torch.tensor([2, 1]))
    tensor([[ 1.,  1.],
            [-1.,  0.]])
    """
    place = torch.arange(potential.shape[1], device=turns.device).expand_as(potential)
    after = torch.cat([potential[:, 1:], potential[:, :1]], dim=1)
    after = torch.where(place == turns[:, None] - 1, final_potential[:, None], after)
    return torch.where(place < turns[:, None], after - potential, 0.0).float()


def standardized(
    steps: Tensor,
    turns: Tensor,
    *,
    compress: bool = True,
    scale_by_rms: bool = True,
    all_reduce: AllReduce | None = None,
) -> Tensor:
    """Compress solver advantages and divide them by their root mean square over all turns of the batch.

    Nothing is subtracted, so a turn that comes no nearer keeps 0.

    Args:
        steps: `[trajectories, turns]`, 0 beyond the last turn; see `solver_advantages`.
        turns: int64 `[trajectories]`, number of turns.
        compress: Take asinh of them, in which large ones grow as their logarithm does.
        scale_by_rms: Divide by the root mean square, over the turns of all ranks.
        all_reduce: Sums a tensor over the ranks; None on one rank.

    >>> standardized(torch.tensor([[3.0, 1.0]]), torch.tensor([2]), compress=False)
    tensor([[1.3416, 0.4472]])
    """
    steps = steps.asinh() if compress else steps
    if not scale_by_rms:
        return steps
    sums = torch.stack([steps.double().square().sum(), turns.sum().double()])
    squares, count = sums if all_reduce is None else all_reduce(sums)
    return (steps / ((squares / count.clamp(min=1)).sqrt() + _EPS)).float()


@checked
@dataclass(frozen=True, kw_only=True)
class SolverTeacher(Estimator):
    """The episode against its group's other members, plus each turn's advantage under a solver's policy.

    `A(i, k) = A_episode(i) + weight h(Phi(s_{k+1}) - Phi(s_k))`, with Phi the environment's `potential()` and
    `h(x) = asinh(x) / rms(asinh(x))` (CAST: Game Solvers as Turn-Level Teachers for LLM Agents, 2026, arXiv 2607.25308,
    as its authors' README states it). Ours are the episode's advantage, leave-one-out in place of GRPO's, which
    divides by a deviation, and unsolvable states, which have the potential that the environment gives them (the authors
    take `-N(s_k)` where a step leads to one).

    A solver's advantage says what a turn is worth if the solver goes on after it. The policy goes on otherwise, so the
    expected gradient is not that of the returns: it imitates the solver where the two disagree, for example on a short
    way that the policy can't walk without a mistake. `rewards.potential.PotentialShaping` with an estimator of
    returns-to-go is the unbiased use of the same potential.

    Attributes:
        weight: Weight of the solver's advantages.
        compress: Take asinh of them.
        scale_by_rms: Divide them by their root mean square over the batch.
    """

    needs_trust = ()

    needs_groups: ClassVar[bool] = True
    needs_potentials: ClassVar[bool] = True
    weight: NonNegative = 0.1
    compress: bool = True
    scale_by_rms: bool = True

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Add the solver's advantages to `rloo` of the returns.

        Raises:
            ValueError: The potential of a state is not known.
        """
        steps = standardized(
            solver_advantages(*inputs.need_potentials(self), inputs.turns),
            inputs.turns,
            compress=self.compress,
            scale_by_rms=self.scale_by_rms,
            all_reduce=all_reduce,
        )
        episode = rloo(inputs.returns, inputs.group)[:, None]
        return broadcast_turns(episode + self.weight * steps, inputs)
