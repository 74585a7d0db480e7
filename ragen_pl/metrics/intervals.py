"""What episodes of a validation set come to: shares with intervals, pass@k, by difficulty."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ragen_pl.metrics.rollout import rollout_metrics
from ragen_pl.trajectory import Trajectory

_TOLD = ("return", "turns", "failed", "valid_actions", "effective_actions", "response_tokens")
_Z = 1.959963984540054  # of a 95% interval


@dataclass(frozen=True, slots=True)
class Share:
    """A share with its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2


def wilson(share: float, *, count: float) -> Share:
    """Return a share of `count` independent trials with its 95% interval (Wilson, 1927).

    >>> interval = wilson(0.5, count=400)
    >>> round(interval.low, 4), round(interval.high, 4)
    (0.4512, 0.5488)
    >>> wilson(1.0, count=100).high
    1.0
    """
    square = _Z**2 / count
    centre = (share + square / 2) / (1 + square)
    spread = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return Share(
        share, max(0.0, min(share, centre - spread)), min(1.0, max(share, centre + spread))
    )


def clustered(successes: Sequence[Sequence[bool]]) -> Share:
    """Return the share of successes over samples of several starts, with its 95% interval.

    Samples of one start are alike, so the interval is Wilson's for as many independent trials as would
    leave the spread between the starts' means: never fewer than starts, never more than samples.

    Args:
        successes: for each start, whether each of its samples succeeded.
    """
    means = [sum(one) / len(one) for one in successes]
    count, total = len(means), sum(map(len, successes))
    share = sum(map(sum, successes)) / total
    if total == count or count < 2:
        return wilson(share, count=total if total == count else count)
    centre = sum(means) / count
    variance = sum((mean - centre) ** 2 for mean in means) / (count - 1) / count
    trials = share * (1 - share) / variance if variance > 0 else count
    return wilson(share, count=min(max(trials, count), total))


def pass_at(k: int, *, samples: int, successes: int) -> float:
    """Return the chance that one of k samples drawn without return succeeds (Chen et al., 2021).

    The unbiased estimator `1 - C(n - c, k) / C(n, k)` of n samples, c of them successes.

    Raises:
        ValueError: there are fewer samples than k.

    >>> pass_at(1, samples=4, successes=1), pass_at(2, samples=4, successes=1)
    (0.25, 0.5)
    >>> pass_at(3, samples=4, successes=2)
    1.0
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass_at: found {k}, expected 1 to {samples}, the samples of a start")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def figures(trajectories: Sequence[Trajectory], *, pass_ks: Sequence[int] = ()) -> dict[str, float]:
    """Return what the episodes come to; groups are the samples of one start.

    Shares of no responses at all are left out.
    """
    success = clustered(_by_start(trajectories))
    known = rollout_metrics(trajectories)
    result = {
        "episodes": known["episodes"],
        "success": success.value,
        "success_low": success.low,
        "success_high": success.high,
    }
    result |= {name: known[name] for name in _TOLD if not math.isnan(known[name])}
    for k in pass_ks:
        rates = [
            pass_at(k, samples=len(one), successes=sum(one)) for one in _by_start(trajectories)
        ]
        interval = wilson(math.fsum(rates) / len(rates), count=len(rates))
        result |= {
            f"pass@{k}": interval.value,
            f"pass@{k}_low": interval.low,
            f"pass@{k}_high": interval.high,
        }
    return result


def by_difficulty(trajectories: Sequence[Trajectory]) -> dict[int, dict[str, float]]:
    """Return success with its interval for each difficulty of a start, easiest first.

    Empty where the environment tells none.
    """
    found: dict[int, list[Trajectory]] = defaultdict(list)
    for one in trajectories:
        if one.difficulty is not None:
            found[one.difficulty].append(one)
    result = {}
    for difficulty, some in sorted(found.items()):
        success = clustered(_by_start(some))
        result[difficulty] = {
            "episodes": float(len(some)),
            "success": success.value,
            "success_low": success.low,
            "success_high": success.high,
        }
    return result


def _by_start(trajectories: Sequence[Trajectory]) -> list[list[bool]]:
    groups: Mapping[int, list[bool]] = defaultdict(list)
    for one in trajectories:
        groups[one.group].append(bool(one.success))
    return list(groups.values())
