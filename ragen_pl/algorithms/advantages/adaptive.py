"""Bi-level GAE whose discount per turn follows the progress of the episode.

The discount of a turn depends on values and rewards up to that turn only. A discount that is a function
of the state keeps the Bellman equation valid (White, 2017, "Unifying task specification in RL").
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.algorithms.credit import AdvantageInputs
from ragen_pl.algorithms.scan import next_on_mask
from ragen_pl.algorithms.turns import sum_at_turn_end, turn_ends
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, Fraction


def turn_progress(
    rewards: Tensor, values: Tensor, turn: Tensor, *, window: int, feedback: float
) -> Tensor:
    """Measure the progress of the episode over the last turns, as known at each turn.

    With V_k the value of turn k, read at its last token, and r_k its reward, the step into turn k is
    `c_k = V_k - V_{k-1} + feedback r_{k-1}`. The progress at k is the mean of the last `window` steps
    up to c_k. It is 0 at the first turn.

    Args:
        rewards: `[trajectories, tokens]`.
        values: `[trajectories, tokens]`.
        turn: int64 `[trajectories, tokens]`, not decreasing along a row; -1 off the mask.
        window: Number of steps to average.
        feedback: Weight of the environment's rewards relative to the changes of the value.

    Returns:
        float32 `[trajectories, tokens]`, 0 off the turn ends.

    >>> values, rewards = torch.tensor([[0.25, 0.5, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    >>> turn = torch.tensor([[0, 1, 2]])
    >>> turn_progress(rewards, values, turn, window=2, feedback=1.0)
    tensor([[0.0000, 0.2500, 0.8750]])
    """
    ends = turn_ends(turn)
    zeros = torch.zeros_like(values[:, 0], dtype=torch.float32)

    def before(x: Tensor) -> Tensor:
        """Return x at the end of the previous turn."""
        return next_on_mask(x.flip(1), mask=ends.flip(1), last=zeros).flip(1)

    # the index of a turn among the turns that have tokens
    number = ends.long().cumsum(1) - 1
    turn_rewards = sum_at_turn_end(rewards.float(), turn=turn)
    steps = values.float() - before(values.float()) + feedback * before(turn_rewards)
    steps = torch.where(ends & (number > 0), steps, 0.0)
    total = steps.cumsum(1)
    # the sum up to the turn `window` turns back lies outside the window
    sums = torch.zeros_like(total).scatter_add(
        1, number.clamp(min=0), torch.where(ends, total, 0.0)
    )
    back = number - window
    outside = torch.where(back >= 0, sums.gather(1, back.clamp(min=0)), 0.0)
    mean = (total - outside) / number.clamp(min=1, max=window)
    return torch.where(ends, mean, 0.0)


@checked
@dataclass(frozen=True, kw_only=True)
class AdaptiveBilevelGAE(BilevelGAE):
    """Bi-level GAE with `gamma_k = clip(gamma_turn + beta progress_k, low, high)` in place of one gamma_turn.

    Progress is that of `turn_progress`: the future counts more after a success, less after a setback.
    With `beta=0` the result equals `BilevelGAE` bit for bit. Turns that do not advance are left out of the progress.

    Attributes:
        beta: Change of the discount per unit of progress.
        low: Lowest discount.
        high: Highest discount.
        window: Number of turns that progress is measured over.
        feedback: Weight of the turns' rewards relative to the changes of the value.
    """

    needs_trust = ()

    beta: float = 0.1
    low: Fraction = 0.8
    high: Fraction = 0.99
    window: Count = 2
    feedback: float = 1.0

    def __post_init__(self) -> None:
        if not self.low <= self.gamma_turn <= self.high:
            raise ValueError(
                f"found gamma_turn={self.gamma_turn} outside low={self.low} and high={self.high}, expected it "
                "between them; widen low and high"
            )

    @property
    def turn_discount(self) -> float | None:
        """None: the discount varies."""
        return None

    def discounts(self, inputs: AdvantageInputs) -> Tensor:
        """Return gamma_k at the turn ends, float64 `[trajectories, tokens]`; gamma_turn elsewhere."""
        progress = turn_progress(
            inputs.rewards,
            self.turn_values(inputs),
            torch.where(inputs.advantage_mask & inputs.advancing, inputs.turn, -1),
            window=self.window,
            feedback=self.feedback,
        )
        return (self.gamma_turn + self.beta * progress.double()).clamp(self.low, self.high)
