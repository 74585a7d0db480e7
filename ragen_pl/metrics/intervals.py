"""Metrics of a validation set's episodes: proportions with intervals, pass@k, success by difficulty."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from ragen_pl.metrics.proportions import (
    Proportion,
    cluster_variance,
    clustered_wilson,
    wilson,
)
from ragen_pl.metrics.rollout import ENVIRONMENT_METRICS, rollout_metrics
from ragen_pl.metrics.shown import SIMULATED_USER
from ragen_pl.trajectory import EpisodeStatus, Trajectory

_ROLLOUT_METRICS = (
    "return",
    "turns",
    "failed",
    "failed_episodes",
    "valid_actions",
    "effective_actions",
    "response_tokens",
)


def clustered(successes: Sequence[Sequence[bool]]) -> Proportion:
    """Return the fraction of successes over samples of several groups, with its 95% interval.

    The interval is that of `clustered_wilson` with the variance of `cluster_variance`.

    Args:
        successes: For each group, whether each of its samples succeeded.
    """
    sizes, sums = [len(samples) for samples in successes], [sum(samples) for samples in successes]
    count, total = len(sizes), sum(sizes)
    rate = sum(sums) / total
    if total == count or count < 2:
        return wilson(rate, count=total if total == count else count)
    variance = cluster_variance(
        rate,
        clusters=count,
        samples=total,
        size_squares=sum(size**2 for size in sizes),
        products=sum(size * own for size, own in zip(sizes, sums, strict=True)),
        squares=sum(own**2 for own in sums),
    )
    return clustered_wilson(rate, variance=variance, groups=count, samples=total)


def pass_at(k: int, *, samples: int, successes: int) -> float:
    """Return the probability that one of k samples drawn without replacement succeeds (Chen et al., 2021).

    The unbiased estimator `1 - C(n - c, k) / C(n, k)` of n samples, c of them successes.

    Raises:
        ValueError: There are fewer samples than k.

    >>> pass_at(1, samples=4, successes=1), pass_at(2, samples=4, successes=1)
    (0.25, 0.5)
    >>> pass_at(3, samples=4, successes=2)
    1.0
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass_at: found {k}, expected 1 to {samples}, the samples of a group")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def validation_metrics(
    trajectories: Sequence[Trajectory], *, pass_ks: Sequence[int] = ()
) -> dict[str, float]:
    """Return the metrics of a validation set's episodes; groups are the samples of one initial state.

    Failed episodes are counted and enter no other metric. pass@k is that of the groups with k others, each weighted by
    its number of others, so that pass@1 is the success. Metrics of no responses at all are left out. `distinct_states`
    is the number of initial states that differ, where they are recorded; the interval of success takes episodes from
    equal ones as samples of a group, and so the seats of a game.

    Raises:
        ValueError: Every episode failed.
    """
    sound = [one for one in trajectories if one.status is not EpisodeStatus.FAILED]
    if not sound:
        raise ValueError("every episode failed")
    groups = _successes(sound, by=lambda one: one.group)
    games = len({one.game for one in sound})
    rollout = rollout_metrics(trajectories)
    states = _successes_by_state(sound)
    metrics = {"episodes": rollout["episodes"]} | _success(sound).metrics("success")
    if states is not None:
        metrics["distinct_states"] = float(len(states))
    metrics |= {name: rollout[name] for name in _ROLLOUT_METRICS if not math.isnan(rollout[name])}
    reported = ("success_reported", *(name for _, name, _ in SIMULATED_USER))
    metrics |= {name: rollout[name] for name in reported if name in rollout}
    metrics |= {
        name: mean for name, mean in rollout.items() if name.startswith(ENVIRONMENT_METRICS)
    }
    failed = rollout["failed_episodes"] > 0
    for k in pass_ks:
        counted = [samples for samples in groups if len(samples) >= k or not failed]
        if counted:
            rates = [
                pass_at(k, samples=len(samples), successes=sum(samples)) for samples in counted
            ]
            weighted = math.fsum(len(one) * rate for one, rate in zip(counted, rates, strict=True))
            mean = weighted / sum(map(len, counted))
            # the seats of a game are groups of their own, and no independent trials
            interval = wilson(mean, count=min(len(rates), games))
            metrics |= interval.metrics(f"pass@{k}")
    return metrics


def success_by_difficulty(trajectories: Sequence[Trajectory]) -> dict[int, dict[str, float]]:
    """Return success with its interval for each difficulty of an initial state, easiest first.

    Empty if the environment reports no difficulty.
    """
    levels: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.difficulty is not None and trajectory.status is not EpisodeStatus.FAILED:
            levels[trajectory.difficulty].append(trajectory)
    return {
        difficulty: {"episodes": float(len(episodes))} | _success(episodes).metrics("success")
        for difficulty, episodes in sorted(levels.items())
    }


def _success(sound: Sequence[Trajectory]) -> Proportion:
    """Return the success of episodes that have not failed, whose samples are those of a state, or else of a game."""
    return clustered(_successes_by_state(sound) or _successes(sound, by=lambda one: one.game))


def _successes(
    sound: Sequence[Trajectory], *, by: Callable[[Trajectory], object]
) -> list[list[bool]]:
    groups: dict[object, list[bool]] = defaultdict(list)
    for trajectory in sound:
        groups[by(trajectory)].append(bool(trajectory.success))
    return list(groups.values())


def _successes_by_state(sound: Sequence[Trajectory]) -> list[list[bool]] | None:
    """Return the successes from each initial state; None where they are not recorded, or are all one.

    A greedy policy plays the same episode from equal states, unless the environment draws more. An environment with one
    initial state has no others to generalize to.
    """
    if any(one.initial_state_key is None for one in sound):
        return None
    states = _successes(sound, by=lambda one: one.initial_state_key)
    return states if len(states) > 1 else None
