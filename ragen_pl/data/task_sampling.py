"""Tasks of an iteration's groups, sampled by their difficulty or by how fast they are learned."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch
from annotated_types import Interval

from ragen_pl.algorithms.task_sampling import Rule, TaskScore, drawn_tasks, task_probabilities
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Fraction, NonNegative
from ragen_pl.base.distributed import sum_over_ranks
from ragen_pl.base.seeding import derive_seed
from ragen_pl.data.curriculum import TaskChoice
from ragen_pl.engines.errors import RolloutError
from ragen_pl.trajectory import EpisodeStatus, Trajectory

log = logging.getLogger(__name__)

# with less, tasks that were never solved would hardly be played again
SharedPart: TypeAlias = Annotated[float, Interval(ge=0.1, le=1)]


@checked
@dataclass(kw_only=True)
class SamplingRule:
    """Rule by which tasks are sampled: how well they were solved, or how fast that changes.

    The score of a task is the mean success of its episodes in an iteration. See `task_probabilities` for the rules and
    their sources.

    Attributes:
        rule: `pools` by the last score, `learnability` by p (1 - p) of the last score p, `progress` by the distance of
            a fast and a slow average of the scores.
        thresholds: Highest score of each pool, in rising order.
        pool_weights: Weight of a task in each pool.
        fast: Weight of the newest score in the fast average.
        slow: Weight of the newest score in the slow average.
        floor: Part of the groups that is divided evenly, without which unseen tasks starve.

    Raises:
        ValueError: The pools do not fit, or `slow` is not below `fast`.
    """

    needs_trust = ()

    rule: Rule = "learnability"
    thresholds: Sequence[Fraction] = (0.25, 0.75, 1.0)
    pool_weights: Sequence[NonNegative] = (0.2, 1.0, 0.2)
    fast: Fraction = 0.5
    slow: Fraction = 0.1
    floor: SharedPart = 0.1

    def __post_init__(self) -> None:
        thresholds = [*self.thresholds]
        rising = thresholds and thresholds == sorted(set(thresholds)) and thresholds[-1] == 1.0
        if not rising or len(thresholds) != len(self.pool_weights):
            raise ValueError(
                f"thresholds={thresholds} with pool_weights={[*self.pool_weights]}: expected rising numbers "
                "that end with 1, and a weight for each"
            )
        if not 0 < self.slow < self.fast:
            raise ValueError(f"slow={self.slow} with fast={self.fast}: expected 0 < slow < fast")


class SampledTasks:
    """Tasks of the groups of each iteration, sampled by their scores.

    The groups are divided by systematic sampling with an offset from the run's seed and the iteration, so a task has
    its share of them, rounded up or down.

    Args:
        rule: Rule of the probabilities.
        weights: Factor of each task's probability, 0 for one that is never played.
    """

    def __init__(self, rule: SamplingRule, weights: Sequence[float]) -> None:
        self.rule, self.weights = rule, [*weights]
        self.scores = [TaskScore() for _ in self.weights]
        # probabilities from an iteration on, the present ones and those before them
        self._since = [(0, self._probabilities())]

    def _probabilities(self) -> list[float]:
        rule = self.rule
        found = task_probabilities(
            self.scores,
            rule=rule.rule,
            thresholds=rule.thresholds,
            pool_weights=rule.pool_weights,
            floor=rule.floor,
        )
        weighted = [one * weight for one, weight in zip(found, self.weights, strict=True)]
        return [one / sum(weighted) for one in weighted]

    def probabilities(self, iteration: int) -> list[float]:
        """Return the probability of each task in the present iteration or in the one before."""
        return next(values for first, values in reversed(self._since) if first <= iteration)

    def of_groups(self, *, groups: int, iteration: int, seed: int) -> list[int]:
        """Return the number of each group's task."""
        offset = derive_seed(seed, "task", iteration) / 2**48
        return drawn_tasks(self.probabilities(iteration), draws=groups, offset=offset)

    def observe(
        self, played: Sequence[tuple[int, Trajectory]], *, iteration: int, key: str
    ) -> None:
        """Score the tasks that were played. All ranks must call it.

        Args:
            played: This rank's episodes with the numbers of their tasks.
            iteration: Number of the iteration.
            key: Setting that samples, for the error.

        Raises:
            RolloutError: No step says whether the task is solved.
        """
        sums = torch.zeros(len(self.scores), 3, dtype=torch.float64)
        for task, one in played:
            if one.status is not EpisodeStatus.FAILED:
                columns = [1.0, float(one.success), float(one.is_silent)]
                sums[task] += torch.tensor(columns, dtype=torch.float64)
        counts, solved, silent_ones = sum_over_ranks(sums).T.tolist()
        if sum(counts) and sum(silent_ones) == sum(counts):
            raise RolloutError(
                f"{key} goes by success, and no step of the environment sets info['success']; set it, or "
                f"{key.partition(':')[0]}=null"
            )
        for score, count, success in zip(self.scores, counts, solved, strict=True):
            if count:
                score.add(success / count, fast=self.rule.fast, slow=self.rule.slow)
        self._since = [*self._since[-1:], (iteration + 1, self._probabilities())]

    def state_dict(self) -> dict[str, object]:
        """Return the state that a resumed run needs."""
        return {
            "scores": [[score.last, score.fast, score.slow] for score in self.scores],
            "since": [[first, [*values]] for first, values in self._since],
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`."""
        scores: list[list[float | None]] = state["scores"]  # type: ignore[assignment]
        self.scores = [TaskScore(*values) for values in scores]
        since: list[tuple[int, list[float]]] = state["since"]  # type: ignore[assignment]
        self._since = [(first, [*values]) for first, values in since]


@checked
@dataclass(kw_only=True)
class TaskSampling(SamplingRule, TaskChoice):
    """Sample the tasks of an iteration's groups by how well they were solved, or by how fast that changes.

    A task is a set of reset options. See `SamplingRule`, whose keys it has, and `SampledTasks`.

    Attributes:
        stages: Reset options of each task, none for the environment's own initial states:
            `[{max_distance: 2}, {min_distance: 3}]`.
        tasks: The tasks with their scores.

    Raises:
        ValueError: There are fewer than two tasks.
    """

    needs_trust = ()

    stages: Sequence[Mapping[str, object]]

    def __post_init__(self) -> None:
        if len(self.stages) < 2:
            raise ValueError(f"stages: found {list(self.stages)}, expected two or more")
        SamplingRule.__post_init__(self)
        self.tasks = SampledTasks(self, [1.0] * len(self.stages))

    def probabilities(self, iteration: int) -> list[float]:
        """Return the probability of each task in the present iteration or in the one before."""
        return self.tasks.probabilities(iteration)

    def options_for(
        self, group: int, *, groups: int, iteration: int, seed: int
    ) -> Mapping[str, object] | None:
        """Return the reset options of a group's task, None for the environment's own initial states."""
        tasks = self.tasks.of_groups(groups=groups, iteration=iteration, seed=seed)
        return self.stages[tasks[group]] or None

    def observe_played(
        self, trajectories: Sequence[Trajectory], *, groups: int, iteration: int, seed: int
    ) -> None:
        """Score the tasks that were played. All ranks must call it.

        Raises:
            RolloutError: No step says whether the task is solved.
        """
        tasks = self.tasks.of_groups(groups=groups, iteration=iteration, seed=seed)
        played = [(tasks[one.game % groups], one) for one in trajectories]
        self.tasks.observe(played, iteration=iteration, key="curriculum: TaskSampling")

    def metrics(self, iteration: int) -> dict[str, float]:
        """Return the probability of each task."""
        shares = enumerate(self.probabilities(iteration))
        return {f"curriculum_task_{number}": share for number, share in shares}

    def state_dict(self) -> dict[str, object]:
        """Return the state that a resumed run needs."""
        return self.tasks.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`. Scores of another number of tasks are left with a line."""
        scores: list[list[float | None]] = state["scores"]  # type: ignore[assignment]
        if len(scores) != len(self.stages):
            log.warning(
                f"curriculum.stages: the checkpoint has the scores of {len(scores)} tasks, and {len(self.stages)} are "
                "set; their scores begin anew"
            )
            return
        self.tasks.load_state_dict(state)
