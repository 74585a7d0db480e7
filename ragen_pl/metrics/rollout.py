"""Metrics of trajectories: success, return, turns, valid actions, lengths, spread within groups.

Failed episodes are counted and enter no other metric: a broken environment says nothing about the agent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from ragen_pl.base.distributed import gather_over_ranks
from ragen_pl.base.finite import largest
from ragen_pl.base.prompt_formats import without_plan
from ragen_pl.metrics.proportions import Z, cluster_variance, clustered_wilson
from ragen_pl.metrics.sums import NamedSums, ratio
from ragen_pl.trajectory import (
    DIFFERENCES,
    JOINED,
    REASONING_SPANS,
    REWARD_PART,
    EpisodeStatus,
    ProgramCall,
    Span,
    Summary,
    Trajectory,
    Turn,
)

# by the number of the span
_IS_REASONING = np.isin(np.arange(len(Span)), REASONING_SPANS)
_SUMS = (
    "episodes",
    "successes",
    "says_success",
    "says_no_success",
    "return",
    "return_square",
    "turns",
    "valid",
    "effective",
    "response_tokens",
    "think_tokens",
    "entropy",
    "entropy_tokens",
    "hit_length_limit",
    "failed",
    "turn_limit",
    "truncated",
    "described_states",
    "correct_thoughts",
    "groups",
    "group_std",
    "games",
    "game_size_square",
    "game_successes",
    "game_successes_square",
    "game_return",
    "game_return_square",
    "solved_groups",
    "observations",
    "observation_agreement",
    "predictions",
    "prediction_agreement",
    "summaries",
    "teacher_prompts",
    "hinted",
    "requests",
    "joined",
    "user_turns",
    "user_errors",
    "user_episodes",
    "without_user_errors",
    "successes_without_user_errors",
    *(f"not_joined_{reason}" for reason in DIFFERENCES),
)

METRICS: Final = (
    "episodes",
    "success",
    "return",
    "return_std",
    "turns",
    "valid_actions",
    "effective_actions",
    "response_tokens",
    "think_tokens",
    "entropy",
    "overlong_responses",
    "failed",
    "failed_episodes",
    "turn_limit",
    "truncated",
    "think_accuracy",
    "observation_accuracy",
    "prediction_accuracy",
    "group_return_std",
    "group_success",
    "summaries",
    "samples_per_episode",
    "joined_fraction",
    "hinted_fraction",
    "success_reported",
    "user_errors",
    "without_user_errors",
    "success_without_user_errors",
)
"""Names of the metrics that `RolloutStatistics.compute` returns, which the config reads from the source."""

DIAGNOSTICS: Final = (
    "success",
    "return",
    "valid_actions",
    "entropy",
    "think_tokens",
    "think_accuracy",
)
"""Metrics that are diagnostics too. The config reads this constant without importing the module."""

ENVIRONMENT_METRICS: Final = "metrics/"
"""Prefix of the metrics that an environment names itself (`info["metrics"]`)."""
# kinds of what the environment and its episodes name: parts of the reward, metrics and how often each of these was
# named, and errors of a simulated user
_REWARD, _OWN, _OWN_COUNT, _USER_ERROR = "reward", "metrics", "metrics named", "user_error"
_SCALED = ("return", "return_std", "group_return_std", "reward/")


def comparable(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of episodes in several environments without those in the scales of their rewards."""
    return {name: value for name, value in metrics.items() if not name.startswith(_SCALED)}


def worst_of(by_environment: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of the environment with the lowest success, the first of equal ones.

    A mean over environments would hide one that is forgotten while others are learned.

    >>> worst_of({"lake": {"success": 0.9, "return": 0.9}, "shop": {"success": 0.2, "return": 40.0}})
    {'success': 0.2, 'return': 40.0}
    """
    return dict(min(by_environment.values(), key=lambda metrics: metrics["success"]))


class RolloutStatistics(NamedSums):
    """Sums over trajectories; a group must not be split over ranks.

    Args:
        over_ranks: Whether `compute` adds up the sums of all ranks, or returns those of this process alone.
    """

    def __init__(self, *, over_ranks: bool = True) -> None:
        super().__init__(_SUMS, over_ranks=over_ranks)
        self._over_ranks = over_ranks
        # by kind and name; ranks may see different ones
        self._named: dict[tuple[str, str], float] = defaultdict(float)

    def update(self, trajectories: Sequence[Trajectory]) -> None:  # type: ignore[override]
        """Count these trajectories."""
        sums: dict[str, float] = defaultdict(float)
        group_returns: dict[int, list[float]] = defaultdict(list)
        solved: set[int] = set()
        for trajectory in trajectories:
            if trajectory.status is EpisodeStatus.FAILED:
                sums["failed"] += 1
                continue
            _add_episode(sums, trajectory)
            group_returns[trajectory.group].append(trajectory.reward)
            if trajectory.success:
                solved.add(trajectory.group)
            for turn in trajectory.turns:
                _add_turn(sums, turn)
                self._add_named(turn)
        spreads = [
            np.std(returns, ddof=1) for returns in group_returns.values() if len(returns) > 1
        ]
        _add_games(sums, trajectories)
        sums["groups"] += len(spreads)
        sums["group_std"] += float(sum(spreads))
        sums["solved_groups"] += sum(len(group_returns[group]) > 1 for group in solved)
        for trajectory in _with_user(trajectories):
            self._add_user(sums, trajectory)
        super().update(sums)

    def compute(self) -> dict[str, float]:
        """Return the metrics; NaN without episodes or turns, no entry for values that are not reported.

        `episodes` is the number of those that have not failed, over which the means are, `failed` the fraction of all
        that have.
        `success_reported` is 0 where no step of any episode said whether the task is solved, and is left out elsewhere.
        Where a game has several episodes, `success_low` to `success_high` and `return_low` to `return_high` are 95%
        intervals for independent games.
        `group_success` is the fraction of groups of several episodes with one that was solved: pass@k for groups of k.
        `hinted_fraction` is the fraction of turns whose prompt a teacher reads with a hint.
        `truncated` is the fraction of episodes that a limit from outside cut, such as that of the context.
        `user_errors` is the fraction of a simulated user's turns with an error, `user_error/<kind>` that with an error
        of a kind, `without_user_errors` the fraction of episodes whose user made none, and
        `success_without_user_errors` the success in these.
        `reward/<name>` is the mean over episodes of a named part of the environment's reward, and `metrics/<name>` that
        over the steps that name a metric. `not_joined_<reason>` is the number of programs' requests that were rendered
        as a whole, by the first of `DIFFERENCES`.
        """
        total = self.totals()
        episodes, turns = total["episodes"], total["turns"]
        mean_return = ratio(total["return"], episodes)
        variance = ratio(total["return_square"], episodes) - mean_return**2
        metrics = {
            "episodes": episodes,
            "success": ratio(total["successes"], episodes),
            "return": mean_return,
            "return_std": largest(0.0, variance) ** 0.5,
            "turns": ratio(turns, episodes),
            "valid_actions": ratio(total["valid"], turns),
            "effective_actions": ratio(total["effective"], turns),
            "response_tokens": ratio(total["response_tokens"], turns),
            "think_tokens": ratio(total["think_tokens"], turns),
            "overlong_responses": ratio(total["hit_length_limit"], turns),
            "failed": ratio(total["failed"], episodes + total["failed"]),
            "failed_episodes": total["failed"],
            "turn_limit": ratio(total["turn_limit"], episodes),
            "truncated": ratio(total["truncated"], episodes),
        }
        optional = {
            "entropy": ("entropy", "entropy_tokens"),
            "think_accuracy": ("correct_thoughts", "described_states"),
            "observation_accuracy": ("observation_agreement", "observations"),
            "prediction_accuracy": ("prediction_agreement", "predictions"),
            "group_return_std": ("group_std", "groups"),
            "group_success": ("solved_groups", "groups"),
            "joined_fraction": ("joined", "requests"),
            "hinted_fraction": ("hinted", "teacher_prompts"),
            "user_errors": ("user_errors", "user_turns"),
            "without_user_errors": ("without_user_errors", "user_episodes"),
            "success_without_user_errors": ("successes_without_user_errors", "without_user_errors"),
        }
        metrics |= _intervals(total)
        metrics |= {
            name: ratio(total[summed], total[count])
            for name, (summed, count) in optional.items()
            if total[count]
        }
        if total["says_no_success"] and not total["says_success"]:
            metrics["success_reported"] = 0.0
        if total["summaries"]:
            metrics["summaries"] = ratio(total["summaries"], episodes)
        if total["requests"]:
            metrics["samples_per_episode"] = ratio(total["requests"] - total["joined"], episodes)
        not_joined = {f"not_joined_{reason}" for reason in DIFFERENCES}
        metrics |= {name: total[name] for name in sorted(not_joined) if total[name]}
        return metrics | self._named_metrics(episodes=episodes, user_turns=total["user_turns"])

    def reset(self) -> None:
        """Forget all trajectories."""
        super().reset()
        self._named.clear()

    def _add_user(self, sums: dict[str, float], trajectory: Trajectory) -> None:
        sums["user_turns"] += len(trajectory.user_errors)
        sums["user_errors"] += sum(map(bool, trajectory.user_errors))
        sums["user_episodes"] += 1
        sums["without_user_errors"] += not trajectory.user_erred
        sums["successes_without_user_errors"] += trajectory.success and not trajectory.user_erred
        for kind in (kind for turn in trajectory.user_errors for kind in turn):
            self._named[_USER_ERROR, kind] += 1.0

    def _add_named(self, turn: Turn) -> None:
        for term, amount in turn.reward_terms.items():
            if term.startswith(REWARD_PART):
                self._named[_REWARD, term.removeprefix(REWARD_PART)] += amount
        for name, value in turn.info.get("metrics", {}).items():
            self._named[_OWN, name] += value
            self._named[_OWN_COUNT, name] += 1.0

    def _named_metrics(self, *, episodes: float, user_turns: float) -> dict[str, float]:
        """Return the means of what the environment and its episodes name."""
        own = dict(self._named)
        every = gather_over_ranks(own) if self._over_ranks else [own]
        keys = sorted({key for one in every for key in one})
        total = {key: math.fsum(one.get(key, 0.0) for one in every) for key in keys}
        counts = {_REWARD: episodes, _USER_ERROR: user_turns}
        return {
            f"{kind}/{name}": ratio(amount, counts.get(kind, total.get((_OWN_COUNT, name), 0.0)))
            for (kind, name), amount in total.items()
            if kind != _OWN_COUNT
        }


def _add_episode(sums: dict[str, float], trajectory: Trajectory) -> None:
    at_turn_limit = trajectory.status is EpisodeStatus.TURN_LIMIT
    sums["episodes"] += 1
    sums["turn_limit"] += at_turn_limit and not trajectory.success
    sums["truncated"] += trajectory.status is EpisodeStatus.TRUNCATED
    sums["successes"] += trajectory.success
    sums["says_success"] += trajectory.says_success is True
    sums["says_no_success"] += trajectory.says_success is False
    sums["return"] += trajectory.reward
    sums["return_square"] += trajectory.reward**2


def _add_games(sums: dict[str, float], trajectories: Sequence[Trajectory]) -> None:
    """Add the sums of a cluster-robust variance, whose clusters are the episodes of a game."""
    games: dict[tuple[str | None, int], list[Trajectory]] = defaultdict(list)
    for one in trajectories:
        if one.status is not EpisodeStatus.FAILED:
            games[one.environment, one.game].append(one)
    for episodes in games.values():
        size = len(episodes)
        successes = sum(one.success for one in episodes)
        total_return = math.fsum(one.reward for one in episodes)
        sums["games"] += 1
        sums["game_size_square"] += size**2
        sums["game_successes"] += size * successes
        sums["game_successes_square"] += successes**2
        sums["game_return"] += size * total_return
        sums["game_return_square"] += total_return**2


def _intervals(total: Mapping[str, float]) -> dict[str, float]:
    """Return 95% intervals of success and return by the variance between games; none for games of one episode."""
    episodes, games = total["episodes"], total["games"]
    if not 1 < games < episodes:
        return {}

    def variance_of(name: str, mean: float) -> float:
        return cluster_variance(
            mean,
            clusters=games,
            samples=episodes,
            size_squares=total["game_size_square"],
            products=total[f"game_{name}"],
            squares=total[f"game_{name}_square"],
        )

    success, mean_return = total["successes"] / episodes, total["return"] / episodes
    half = Z * variance_of("return", mean_return) ** 0.5
    interval = clustered_wilson(
        success, variance=variance_of("successes", success), groups=games, samples=episodes
    )
    return {
        "success_low": interval.low,
        "success_high": interval.high,
        "return_low": mean_return - half,
        "return_high": mean_return + half,
    }


def _with_user(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return one trajectory of each episode with a simulated user, the agent's where it has had a turn."""
    episodes: dict[tuple[int, int], Trajectory] = {}
    for one in sorted(trajectories, key=lambda one: not one.is_user):
        if one.user_errors and one.status is not EpisodeStatus.FAILED:
            episodes[one.game, one.member] = one
    return list(episodes.values())


def episode_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return those of whole episodes, whoever plays a seat: of a simulated user, and what the environment names."""
    return {
        name: value
        for name, value in metrics.items()
        if "user_error" in name or name.startswith(ENVIRONMENT_METRICS)
    }


def _add_turn(sums: dict[str, float], turn: Turn) -> None:
    if isinstance(turn.kind, Summary):
        sums["summaries"] += 1
        return
    sums["turns"] += 1
    sums["valid"] += turn.action_is_valid
    sums["effective"] += turn.action_is_effective
    sums["response_tokens"] += len(turn.response_ids)
    sums["think_tokens"] += int(_IS_REASONING[turn.spans].sum())
    if turn.response_entropy is not None:
        sums["entropy"] += turn.response_entropy * len(turn.response_ids)
        sums["entropy_tokens"] += len(turn.response_ids)
    sums["hit_length_limit"] += turn.hit_length_limit
    for statement in turn.statements:
        sums[f"{statement.block}s"] += 1
        sums[f"{statement.block}_agreement"] += statement.agreement
    if isinstance(turn.kind, ProgramCall) and turn.kind.history is not None:
        sums["requests"] += 1
        sums["joined"] += turn.kind.history == JOINED
        if turn.kind.history in DIFFERENCES:
            sums[f"not_joined_{turn.kind.history}"] += 1
    if turn.teacher_prompt_ids is not None:
        sums["teacher_prompts"] += 1
        sums["hinted"] += not np.array_equal(turn.teacher_prompt_ids, turn.prompt_ids)
    if turn.state_description is not None:
        sums["described_states"] += 1
        sums["correct_thoughts"] += _describes(turn.think, turn.state_description)


def _describes(thought: str | None, description: str) -> bool:
    """Return whether a thought is a description of the state, or begins with it and goes on with a plan."""
    return thought is not None and without_plan(thought, description) == description


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of these trajectories alone, without those of other ranks."""
    statistics = RolloutStatistics(over_ranks=False)
    statistics.update(trajectories)
    return statistics.compute()
