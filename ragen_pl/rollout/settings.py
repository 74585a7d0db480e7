"""Settings of the rollout that training and evaluation share; read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, Fraction, FractionBelowOne, Positive, PositiveFraction
from ragen_pl.trajectory import FailureCause

if TYPE_CHECKING:
    from ragen_pl.rollout.temperature import AdaptiveTemperature


@checked
@dataclass(kw_only=True)
class EpisodeSettings:
    """Keys of `rollout` that an `AgentProxy` plays episodes with, in training and in evaluation.

    Attributes:
        temperature: Sampling temperature.
        top_p: Smallest set of the most probable ids with at least this probability that sampling keeps; 1 for all.
        top_k: Number of the most probable ids that sampling keeps; None for all.
        min_p: Least probability of an id that sampling keeps, as a fraction of that of the most probable; 0 for all.
        max_response_tokens: Longest response.
        num_envs: Number of environments played at once.
        adaptive_temperature: Temperature of a turn from the turns before it; None keeps it constant.
    """

    temperature: Positive = 1.0
    top_p: PositiveFraction = 1.0
    top_k: Count | None = None
    min_p: FractionBelowOne = 0.0
    max_response_tokens: Count = 24
    num_envs: Count = 512
    adaptive_temperature: AdaptiveTemperature | None = None


@checked
@dataclass(frozen=True, kw_only=True)
class FailureSettings:
    """Keys of `rollout.failures`: what follows the errors of environments.

    Attributes:
        attempts: Attempts at an episode whose errors are those of infrastructure (connections, time limits, processes
            that end, services that are full): each has another environment and the same seeds.
        data_attempts: Attempts at an episode with any other error.
        min_group_fraction: Fraction of a group's episodes below which none of them is trained on.
        min_fraction: Fraction of an iteration's episodes that must be left to train on; with fewer the iteration is
            played once more, and then the run ends.
        stall_s: Seconds without the end of any turn, after which the stacks of all threads are printed and the run
            ends; None for no limit.
    """

    attempts: Count = 3
    data_attempts: Count = 1
    min_group_fraction: Fraction = 0.75
    min_fraction: Fraction = 0.9
    stall_s: Positive | None = 900.0

    def attempts_after(self, cause: FailureCause | None) -> int:
        """Return the number of attempts at an episode that has failed for a cause."""
        return self.attempts if cause is FailureCause.INFRASTRUCTURE else self.data_attempts
