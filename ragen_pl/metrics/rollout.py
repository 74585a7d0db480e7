"""What a set of trajectories shows: success, return, turns, form, lengths, spread within groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ragen_pl.metrics.sums import NamedSums, ratio
from ragen_pl.trajectory import EpisodeStatus, Span, Trajectory

_NAMES = (
    "episodes", "successes", "return", "return_square", "turns", "valid", "effective", "response_tokens", "think_tokens",
    "entropy", "hit_length_limit", "failed", "turn_limit", "truth_known", "truth_told", "groups", "group_std",
    "observations_told", "true_observations", "predictions_told", "true_predictions",
)  # fmt: skip
_THOUGHTS = (Span.THINK, Span.OBSERVATION, Span.PREDICTION)


class RolloutStatistics(NamedSums):
    """Sums over trajectories; groups must not be split over ranks.

    Args:
        over_ranks: whether `compute` adds the ranks' sums up; False for metrics of one process.
    """

    def __init__(self, *, over_ranks: bool = True) -> None:
        super().__init__(_NAMES, over_ranks=over_ranks)

    def update(self, trajectories: Sequence[Trajectory]) -> None:  # type: ignore[override]
        """Count these trajectories."""
        sums: dict[str, float] = defaultdict(float)
        groups: dict[int, list[float]] = defaultdict(list)
        for trajectory in trajectories:
            sums["episodes"] += 1
            sums["failed"] += trajectory.status is EpisodeStatus.FAILED
            sums["turn_limit"] += (
                trajectory.status is EpisodeStatus.TURN_LIMIT and not trajectory.success
            )
            sums["successes"] += trajectory.success
            sums["return"] += trajectory.reward
            sums["return_square"] += trajectory.reward**2
            groups[trajectory.group].append(trajectory.reward)
            for turn in trajectory.turns:
                sums["turns"] += 1
                sums["valid"] += turn.action_is_valid
                sums["effective"] += turn.action_is_effective
                sums["response_tokens"] += len(turn.response_ids)
                sums["think_tokens"] += int(np.isin(turn.spans, _THOUGHTS).sum())
                sums["entropy"] += turn.response_entropy * len(turn.response_ids)
                sums["hit_length_limit"] += turn.hit_length_limit
                for statement in turn.statements:
                    sums[f"{statement.part}s_told"] += 1
                    sums[f"true_{statement.part}s"] += statement.agreement
                if "truth" in turn.info:
                    sums["truth_known"] += 1
                    sums["truth_told"] += turn.think == turn.info["truth"]
        spreads = [np.std(rewards, ddof=1) for rewards in groups.values() if len(rewards) > 1]
        sums["groups"] += len(spreads)
        sums["group_std"] += float(sum(spreads))
        super().update(sums)

    def compute(self) -> dict[str, float]:
        """Return the metrics; `nan` where nothing was counted."""
        total = self.totals()
        episodes, turns = total["episodes"], total["turns"]
        figures = {
            "episodes": episodes,
            "success": ratio(total["successes"], episodes),
            "return": ratio(total["return"], episodes),
            "return_std": max(
                0.0, ratio(total["return_square"], episodes) - ratio(total["return"], episodes) ** 2
            )
            ** 0.5,
            "turns": ratio(turns, episodes),
            "valid_actions": ratio(total["valid"], turns),
            "effective_actions": ratio(total["effective"], turns),
            "response_tokens": ratio(total["response_tokens"], turns),
            "think_tokens": ratio(total["think_tokens"], turns),
            "entropy": ratio(total["entropy"], total["response_tokens"]),
            "overlong_responses": ratio(total["hit_length_limit"], turns),
            "failed": ratio(total["failed"], episodes),
            "turn_limit": ratio(total["turn_limit"], episodes),
        }
        if total["truth_known"]:
            figures["true_thoughts"] = ratio(total["truth_told"], total["truth_known"])
        for part in ("observations", "predictions"):
            if total[f"{part}_told"]:
                figures[f"true_{part}"] = ratio(total[f"true_{part}"], total[f"{part}_told"])
        if total["groups"]:
            figures["group_return_std"] = ratio(total["group_std"], total["groups"])
        return figures


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of these trajectories alone, whatever other ranks have played."""
    statistics = RolloutStatistics(over_ranks=False)
    statistics.update(trajectories)
    return statistics.compute()
