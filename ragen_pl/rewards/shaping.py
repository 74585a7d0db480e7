"""What a turn's reward is made of besides the environment's own: weights of its parts, and shaping.

The parts that the EnvironmentManager and the world-model reward leave in `Turn.reward_terms` are weighed
here, and further ones added, by name. A turn's reward stays the sum of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ragen_pl.trajectory import Span, Trajectory, Turn


class Place(StrEnum):
    """Which turn a reward is given in."""

    TURN = "turn"  # the one that earned it
    END = "end"  # the last: all rewards of the episode together


@dataclass(frozen=True, kw_only=True)
class RewardShaping:
    """Weigh and shape the rewards of trajectories.

    Args:
        place: where rewards are given.
        turn_weight: of the environment's rewards before the last turn.
        final_weight: of the environment's reward in the last turn.
        format_weight: of the penalty for responses without a valid action (`env.format_penalty`).
        think_amount: reward of a reasoning as long as `think_high` tokens; below `think_low` it is 0 and
            between them in proportion. Negative to make reasonings shorter.
        think_low: tokens.
        think_high: tokens.
        action_efficiency: taken from a turn whose valid actions changed nothing.
        overlong_penalty: taken from a turn whose response hit its length limit.

    Raises:
        ValueError: `think_low` is not below `think_high`.
    """

    place: Place = Place.TURN
    turn_weight: float = 1.0
    final_weight: float = 1.0
    format_weight: float = 1.0
    think_amount: float = 0.0
    think_low: int = 0
    think_high: int = 16
    action_efficiency: float = 0.0
    overlong_penalty: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings."""
        object.__setattr__(self, "place", Place(self.place))
        if not 0 <= self.think_low < self.think_high:
            raise ValueError(
                f"algorithm.reward: found think_low={self.think_low} and think_high={self.think_high}, expected "
                "0 <= think_low < think_high"
            )

    def settle(self, trajectories: Sequence[Trajectory]) -> None:
        """Set the rewards of these trajectories' turns; call it once for each trajectory."""
        if self == RewardShaping():
            return
        for trajectory in trajectories:
            for turn in trajectory.turns:
                self._weigh(turn, last=turn is trajectory.turns[-1])
            if self.place is Place.END:
                _move_to_the_end(trajectory.turns)
            for turn in trajectory.turns:
                turn.reward = float(sum(turn.reward_terms.values()))

    def _weigh(self, turn: Turn, *, last: bool) -> None:
        parts = turn.reward_terms or {"environment": turn.reward}
        weights = {
            "environment": self.final_weight if last else self.turn_weight,
            "format": self.format_weight,
        }
        parts = {name: weights.get(name, 1.0) * value for name, value in parts.items()}
        if self.think_amount:
            tokens = int((turn.spans == Span.THINK).sum())
            share = (tokens - self.think_low) / (self.think_high - self.think_low)
            parts["think_length"] = self.think_amount * min(1.0, max(0.0, share))
        if self.action_efficiency and turn.action_is_valid and not turn.action_is_effective:
            parts["action_efficiency"] = -self.action_efficiency
        if self.overlong_penalty and turn.hit_length_limit:
            parts["hit_length_limit"] = -self.overlong_penalty
        turn.reward_terms = parts


def _move_to_the_end(turns: Sequence[Turn]) -> None:
    total: dict[str, float] = {}
    for turn in turns:
        for name, value in turn.reward_terms.items():
            total[name] = total.get(name, 0.0) + value
        turn.reward_terms = {}
    if turns:
        turns[-1].reward_terms = total
