"""Curricula: which initial states the groups of an iteration begin in, by the success so far.

`Curriculum` has stages, each begun after enough success in those before it. `ragen_pl.data.task_sampling` has tasks
without an order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, Fraction
from ragen_pl.base.distributed import sum_over_ranks
from ragen_pl.trajectory import EpisodeStatus, Trajectory


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
        # less the noise of a product
        return group < self.fraction * groups - 1e-9 or not self.stage(iteration)

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
