"""Metrics of a validation set's episodes: proportions with intervals, pass@k, success by difficulty."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from ragen_pl.metrics.proportions import Proportion, wilson
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

    Samples of a group are correlated. The interval is Wilson's for the number of independent trials that
    would give the observed variance between the groups' means, at least the number of groups and at most the
    number of samples.

    Args:
        successes: For each group, whether each of its samples succeeded.
    """
    means = [sum(samples) / len(samples) for samples in successes]
    count, total = len(means), sum(map(len, successes))
    rate = sum(map(sum, successes)) / total
    if total == count or count < 2:
        return wilson(rate, count=total if total == count else count)
    center = sum(means) / count
    variance = sum((mean - center) ** 2 for mean in means) / (count - 1) / count
    trials = rate * (1 - rate) / variance if variance > 0 else count
    return wilson(rate, count=min(max(trials, count), total))


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
    is the number of initial states that differ, where turns record them; the interval of success takes episodes from
    equal ones as samples of a group.

    Raises:
        ValueError: Every episode failed.
    """
    groups = _successes_by_group(trajectories)
    if not groups:
        raise ValueError("every episode failed")
    rollout = rollout_metrics(trajectories)
    states = _successes_by_state(trajectories)
    metrics = {"episodes": rollout["episodes"]} | clustered(states or groups).metrics("success")
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
            interval = wilson(mean, count=len(rates))
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
        difficulty: {"episodes": float(len(episodes))}
        | clustered(_successes_by_state(episodes) or _successes_by_group(episodes)).metrics(
            "success"
        )
        for difficulty, episodes in sorted(levels.items())
    }


def _successes_by_group(trajectories: Sequence[Trajectory]) -> list[list[bool]]:
    groups: dict[int, list[bool]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.status is not EpisodeStatus.FAILED:
            groups[trajectory.group].append(bool(trajectory.success))
    return list(groups.values())


def _successes_by_state(trajectories: Sequence[Trajectory]) -> list[list[bool]] | None:
    """Return the successes from each initial state; None where they are not recorded, or are all one.

    A greedy policy plays the same episode from equal states, unless the environment draws more. An environment with one
    initial state has no others to generalize to.
    """
    states: dict[str, list[bool]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.status is not EpisodeStatus.FAILED:
            key = trajectory.turns[0].state_key if trajectory.turns else None
            if key is None:
                return None
            states[key].append(bool(trajectory.success))
    return list(states.values()) if len(states) > 1 else None
