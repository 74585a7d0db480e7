"""Settings of the rollout that training and evaluation share; read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragen_pl.checked import checked
from ragen_pl.constraints import Count, FractionBelowOne, Positive, PositiveFraction

if TYPE_CHECKING:
    from ragen_pl.rollout.temperature import AdaptiveTemperature


@checked
@dataclass(kw_only=True)
class EpisodeSettings:
    """Keys of `rollout` that an `AgentProxy` plays episodes with, in training and in evaluation.

    Attributes:
        temperature: sampling temperature.
        top_p: smallest set of the most probable ids with at least this probability that sampling keeps; 1 for all.
        top_k: number of the most probable ids that sampling keeps; None for all.
        min_p: least probability of an id that sampling keeps, as a fraction of that of the most probable; 0 for all.
        max_response_tokens: longest response.
        num_envs: number of environments played at once.
        adaptive_temperature: temperature of a turn from the turns before it; None keeps it constant.
    """

    temperature: Positive = 1.0
    top_p: PositiveFraction = 1.0
    top_k: Count | None = None
    min_p: FractionBelowOne = 0.0
    max_response_tokens: Count = 24
    num_envs: Count = 512
    adaptive_temperature: AdaptiveTemperature | None = None
