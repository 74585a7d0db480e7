"""Probabilities of tasks, by their difficulty to the policy or by how fast it learns them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Rule: TypeAlias = Literal["pools", "learnability", "progress"]

# of a task that was never played
_UNSEEN = {"pools": 1.0, "learnability": 0.25, "progress": 1.0}


@dataclass(slots=True)
class TaskScore:
    """Scores of a task: the last one and two running averages, which start at the first; None before it."""

    last: float | None = None
    fast: float | None = None
    slow: float | None = None

    def add(self, score: float, *, fast: float, slow: float) -> None:
        """Add a score.

        Args:
            score: Mean success, 0 to 1.
            fast: Weight of the new score in the fast average.
            slow: Weight of the new score in the slow average.
        """
        self.last = score
        self.fast = score if self.fast is None else self.fast + fast * (score - self.fast)
        self.slow = score if self.slow is None else self.slow + slow * (score - self.slow)

    def weight(
        self, rule: Rule, *, thresholds: Sequence[float], pool_weights: Sequence[float]
    ) -> float:
        """Return the weight of the task by a rule, see `task_probabilities`."""
        if self.last is None or self.fast is None or self.slow is None:
            return _UNSEEN[rule]
        if rule == "pools":
            below = sum(self.last > threshold for threshold in thresholds)
            return pool_weights[min(below, len(pool_weights) - 1)]
        if rule == "learnability":
            return self.last * (1.0 - self.last)
        return abs(self.fast - self.slow)


def task_probabilities(
    scores: Sequence[TaskScore],
    *,
    rule: Rule,
    thresholds: Sequence[float],
    pool_weights: Sequence[float],
    floor: float,
) -> list[float]:
    """Return the probability of each task, floor / N + (1 - floor) w / sum of w.

    - `pools`: w is the weight of the first pool whose threshold is not below the last score; 1 for unseen tasks
      (difficulty pools as in prime-rl).
    - `learnability`: w = p (1 - p) of the last score p, the variance of the success; 0.25 for unseen tasks (Foster et
      al., 2025).
    - `progress`: `w = |fast - slow|` of two running averages; 1 for unseen tasks (learning progress: Oudeyer et al.,
      2007).

    Where all weights are 0, all tasks are equally likely.

    Args:
        scores: Scores of the tasks.
        rule: Kind of weight.
        thresholds: Highest score of each pool, in rising order.
        pool_weights: Weight of a task in each pool.
        floor: Part of a uniform distribution.

    >>> seen, unseen = TaskScore(0.5, 0.5, 0.5), TaskScore()
    >>> pools = {"thresholds": [0.25, 0.75, 1.0], "pool_weights": [0.2, 1.0, 0.2]}
    >>> task_probabilities([seen, unseen, TaskScore(1.0, 1.0, 1.0)], rule="learnability", floor=0.0, **pools)
    [0.5, 0.5, 0.0]
    """
    weights = [
        score.weight(rule, thresholds=thresholds, pool_weights=pool_weights) for score in scores
    ]
    return probabilities_of(weights, floor=floor)


def probabilities_of(weights: Sequence[float], *, floor: float) -> list[float]:
    """Return floor / N + (1 - floor) w / sum of w for each weight w; where all are 0, all are equally likely.

    Args:
        weights: N numbers of 0 or more.
        floor: Part of a uniform distribution.

    >>> probabilities_of([1.0, 3.0], floor=0.5), probabilities_of([0.0, 0.0], floor=0.1)
    ([0.375, 0.625], [0.5, 0.5])
    """
    total, count = math.fsum(weights), len(weights)
    if not total:
        return [1.0 / count] * count
    return [floor / count + (1.0 - floor) * weight / total for weight in weights]


def drawn_tasks(probabilities: Sequence[float], *, draws: int, offset: float) -> list[int]:
    """Return the tasks at the points (j + offset) / draws of the cumulative probabilities, in rising order.

    Each task is drawn as often as its expected number, rounded up or down.

    Args:
        probabilities: Probability of each task.
        draws: Number of draws.
        offset: From 0 to below 1.

    >>> drawn_tasks([0.5, 0.25, 0.25], draws=4, offset=0.5)
    [0, 0, 1, 2]
    """
    ends: list[float] = []
    for probability in probabilities:
        ends.append((ends[-1] if ends else 0.0) + probability)
    # rounding may leave the last end below 1
    last = max(number for number, probability in enumerate(probabilities) if probability > 0)
    drawn, task = [], 0
    for draw in range(draws):
        point = (draw + offset) / draws
        while task < last and point >= ends[task]:
            task += 1
        drawn.append(task)
    return drawn
