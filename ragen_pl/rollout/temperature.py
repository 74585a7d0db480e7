"""A sampling temperature for each turn, from the rewards and effects of the turns before it; off by default.

The critic does not run while responses are sampled, so its values do not enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, Positive
from ragen_pl.base.run_facts import RunFacts
from ragen_pl.trajectory import Turn


@checked
@dataclass(frozen=True, kw_only=True)
class AdaptiveTemperature:
    """`clip(temperature + beta progress, low, high)`: higher after progress, lower after setbacks.

    Progress is the mean over the last `window` turns of `reward * (the turn's reward) + effective * (1 if its
    actions changed the environment, else -1)`; 0 at the first turn.

    Attributes:
        beta: Weight of the progress.
        low: Lowest temperature.
        high: Highest temperature.
        window: Number of latest turns.
        reward: Weight of a turn's reward.
        effective: Weight of a turn's effect.
    """

    needs_trust = ()

    beta: float = 0.2
    low: Positive = 0.6
    high: Positive = 1.2
    window: Count = 2
    reward: float = 1.0
    effective: float = 0.5

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.low > self.high:
            raise ValueError(
                f"rollout.adaptive_temperature.low={self.low}: expected at most high={self.high}; change one of them"
            )

    def check_run(self, facts: RunFacts) -> None:
        """Check that the base temperature is inside the bounds."""
        if not self.low <= facts.temperature <= self.high:
            raise ValueError(
                f"rollout.temperature={facts.temperature}: outside rollout.adaptive_temperature's low={self.low} and "
                f"high={self.high}, which would never use it; set one between them"
            )

    def __call__(self, base: float, turns: Sequence[Turn]) -> float:
        """Return the temperature of the turn after these.

        Examples:
            >>> AdaptiveTemperature(low=0.5)(1.0, [])
            1.0
        """
        # a summary has no effect, and is not meant to
        latest = [turn for turn in turns if turn.is_task_step][-self.window :]
        if not latest:
            return min(max(base, self.low), self.high)
        signals = [
            self.reward * turn.reward + self.effective * (1 if turn.action_is_effective else -1)
            for turn in latest
        ]
        return min(max(base + self.beta * sum(signals) / len(signals), self.low), self.high)
