"""Curricula: which initial states the groups of an iteration begin in, by the success so far.

`Curriculum` has stages, each begun after enough success in those before it. `TaskSampling` has tasks, whose shares of
the groups follow their difficulty or their progress.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch
from annotated_types import Interval

from ragen_pl.algorithms.task_sampling import Rule, TaskScore, drawn_tasks, task_probabilities
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, Fraction, NonNegative
from ragen_pl.base.distributed import sum_over_ranks
from ragen_pl.base.seeding import derive_seed
from ragen_pl.engines.errors import RolloutError
from ragen_pl.trajectory import EpisodeStatus, Trajectory

log = logging.getLogger(__name__)

# with less, tasks that were never solved would hardly be played again
SharedPart: TypeAlias = Annotated[float, Interval(ge=0.1, le=1)]


class TaskChoice(ABC):
    """Base of what chooses the reset options of an iteration's groups.

    Its state is the same on every rank, and in checkpoints.
    """

    @abstractmethod
    def options_for(
        self, group: int, *, groups: int, iteration: int, seed: int
    ) -> Mapping[str, object] | None:
        """Return the reset options of a group, None for the environment's own initial states.

        Args:
            group: Number of the group in a rollout, from 0.
            groups: Number of groups of a rollout.
            iteration: Number of the iteration.
            seed: Seed of the run.
        """

    @abstractmethod
    def observe_played(
        self, trajectories: Sequence[Trajectory], *, groups: int, iteration: int, seed: int
    ) -> None:
        """Take note of this rank's episodes of an iteration. All ranks must call it.

        Args:
            trajectories: The episodes.
            groups: Number of groups of a rollout.
            iteration: Number of the iteration.
            seed: Seed of the run.
        """

    @abstractmethod
    def metrics(self, iteration: int) -> dict[str, float]:
        """Return the metrics of an iteration's choice of episodes."""

    @abstractmethod
    def state_dict(self) -> dict[str, object]:
        """Return the state that a resumed run needs."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`."""


@checked
@dataclass(kw_only=True)
class Curriculum(TaskChoice):
    """Begin the next stage when mean sampled success in the present one exceeds `above`.

    In an environment that sets no `info["success"]`, the mean return takes its place, until an episode has one.

    All groups play the first stage. Later a fraction of them plays the present stage, and the others those before it in
    turn.

    Attributes:
        stages: Reset options of each stage in order, none for the environment's own initial states:
            `[{}, {"min_distance": 3}]`.
        above: Mean success over the last `window` iterations of a stage, or mean return in an environment that sets no
            success; a higher one begins the next stage.
        fraction: Fraction of the groups that play the present stage.
        window: Number of iterations to average.

    Raises:
        ValueError: There are fewer than two stages.
    """

    needs_trust = ()

    stages: Sequence[Mapping[str, object]]
    above: float
    fraction: Fraction
    window: Count = 5

    def __post_init__(self) -> None:
        if len(self.stages) < 2:
            raise ValueError(f"stages: found {list(self.stages)}, expected two or more")
        self.history: list[float] = []
        self.says_success: bool | None = None
        """Whether an episode of the run has said whether the task is solved; None before a step of any."""
        self.starts: list[int] = []
        """First iteration of each stage after the first one."""

    def stage(self, iteration: int) -> int:
        """Return the number of an iteration's stage, from 0."""
        return sum(start <= iteration for start in self.starts)

    def observe(
        self,
        success: float,
        *,
        iteration: int,
        mean_return: float = 0.0,
        says_success: bool | None = True,
    ) -> None:
        """Add an iteration's sampled episodes in its stage; the arguments must be the same on every rank.

        Args:
            success: Mean success.
            iteration: Number of the iteration.
            mean_return: Mean return.
            says_success: Whether an episode has said whether the task is solved; None without a step.
        """
        if says_success and self.says_success is False:
            self.history = []
        if says_success is not None and not self.says_success:
            self.says_success = says_success
        value = mean_return if self.says_success is False else success
        self.history = [*self.history, value][-self.window :]
        last = len(self.starts) == len(self.stages) - 1
        full = len(self.history) == self.window
        if full and not last and sum(self.history) / self.window > self.above:
            self.starts.append(iteration + 1)
            self.history = []

    def observe_played(
        self, trajectories: Sequence[Trajectory], *, groups: int, iteration: int, seed: int = 0
    ) -> None:
        """Add this rank's episodes of an iteration, those in its stage. All ranks must call it."""
        played = [
            one
            for one in trajectories
            if one.status is not EpisodeStatus.FAILED
            and self.plays_present_stage(one.game % groups, groups=groups, iteration=iteration)
        ]
        columns = [
            (1, one.success, one.reward, one.says_success is True, one.says_success is False)
            for one in played
        ]
        sums = torch.tensor(columns, dtype=torch.float64).view(-1, 5).sum(0)
        count, solved, returns, saying, silent = sum_over_ranks(sums).tolist()
        if count:
            self.observe(
                solved / count,
                iteration=iteration,
                mean_return=returns / count,
                says_success=saying > 0 if saying or silent else None,
            )

    def options_for(
        self, group: int, *, groups: int, iteration: int, seed: int = 0
    ) -> Mapping[str, object] | None:
        """Return the reset options of a group, None for the environment's own initial states."""
        stage = self.stage(iteration)
        if not self.plays_present_stage(group, groups=groups, iteration=iteration):
            stage = group % stage
        return self.stages[stage] or None

    def plays_present_stage(self, group: int, *, groups: int, iteration: int) -> bool:
        """Return whether a group plays the iteration's stage, and not an earlier one."""
        return group < self.fraction * groups or not self.stage(iteration)

    def metrics(self, iteration: int) -> dict[str, float]:
        """Return the iteration's stage."""
        return {"curriculum_stage": float(self.stage(iteration))}

    def state_dict(self) -> dict[str, object]:
        """Return the state that a resumed run needs."""
        return {
            "history": list(self.history),
            "starts": list(self.starts),
            "says_success": self.says_success,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`. A stage that there is no longer leads to the last one."""
        self.history, starts = list(state["history"]), list(state["starts"])  # type: ignore[call-overload]
        self.starts = starts[: len(self.stages) - 1]
        # checkpoints of earlier versions hold successes
        self.says_success = state.get("says_success", True)  # type: ignore[assignment]


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
                silent = one.says_success is False
                columns = [1.0, float(one.success), float(silent)]
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
