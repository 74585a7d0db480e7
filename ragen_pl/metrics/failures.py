"""Metrics of failures: attempts at episodes whose environments fail, and what is left to train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragen_pl.metrics.sums import NamedSums
from ragen_pl.trajectory import EpisodeStatus, FailureCause, Trajectory

_SUMS = (
    "retried",
    "failed_infrastructure",
    "failed_data",
    "failed_attempts",
    "failed_turns",
    "replayed_steps",
)
_REPORTED = ("retried", "failed_infrastructure", "failed_data", "replayed_steps")
REPLAYED_STEPS = "replayed_steps"
"""Key of a turn's `info`: number of steps that an environment has repeated elsewhere, since its session was lost."""


class FailureStatistics(NamedSums):
    """Sums over the trajectories of an iteration."""

    def __init__(self) -> None:
        super().__init__(_SUMS)

    def update(self, trajectories: Sequence[Trajectory]) -> None:  # type: ignore[override]
        """Count these trajectories."""
        failed = [one for one in trajectories if one.status is EpisodeStatus.FAILED]
        broken = sum(one.cause is FailureCause.INFRASTRUCTURE for one in failed)
        earlier = [turns for one in trajectories for turns in one.failed_after]
        steps = sum(_steps(turn.info) for one in trajectories for turn in one.turns)
        super().update(
            {
                "retried": len(earlier),
                "failed_infrastructure": broken,
                "failed_data": len(failed) - broken,
                "failed_attempts": len(earlier) + len(failed),
                "failed_turns": sum(earlier) + sum(len(one.turns) for one in failed),
                "replayed_steps": steps + sum(one.replayed_turns for one in trajectories),
            }
        )

    def compute(self) -> dict[str, float]:
        """Return the metrics.

        `retried` is the number of attempts after the first ones. `failed_turns` is the mean number of turns of attempts
        that have failed, with no entry without any: one that is far from `turns` shows failures that depend on what the
        agent does.
        """
        total = self.totals()
        metrics = {name: total[name] for name in _REPORTED}
        if total["failed_attempts"]:
            metrics["failed_turns"] = total["failed_turns"] / total["failed_attempts"]
        return metrics


def _steps(info: dict[str, Any]) -> int:
    steps = info.get(REPLAYED_STEPS, 0)
    return steps if isinstance(steps, int) else 0
