"""Mixture: which environment each group of a run plays, and in which state it begins; demonstrations in several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragen_pl.algorithms.mixture import MixtureSchedule
from ragen_pl.base.checked import checked
from ragen_pl.base.restoring import restore
from ragen_pl.base.seeding import derive_seed
from ragen_pl.data.curriculum import TaskChoice
from ragen_pl.data.demonstrations import DemonstrationDataModule, WarmStartDataModule
from ragen_pl.data.settings import UpdateSettings, WarmStartSettings
from ragen_pl.data.task_sampling import SampledTasks, SamplingRule
from ragen_pl.engines.errors import RolloutError
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rewards.shaping import RewardFunction
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedEnvironment:
    """Settings of an environment of a mixture in training; the others are its manager's.

    Attributes:
        share: Share of the groups and of the loss; 0 for an environment that is validated alone.
        curriculum: Chooses its initial states by its own success so far; None for none.
        rewards: Reward functions, applied in order to its episodes.
    """

    share: float
    curriculum: TaskChoice | None = None
    rewards: Sequence[RewardFunction] = ()


class Mixture(TaskChoice):
    """The environments of a run with several, whose groups follow `MixtureSchedule` or are sampled by success.

    The seeds of an environment's groups come from its name and the number of its own groups before, so they do not
    depend on the other environments. Further rollouts of an iteration (`GroupFilter.resample`) play the environments
    of its first one again.

    Args:
        environments: Environments by name.
        sampling: Rule by which groups are sampled, where environments are the tasks and a share is a factor of the
            probability; None for shares that stay.

    Raises:
        ValueError: A share is negative, or all are 0.
    """

    def __init__(
        self, environments: Mapping[str, MixedEnvironment], sampling: SamplingRule | None = None
    ) -> None:
        self.environments = dict(environments)
        self._names = [*environments]
        self._schedule = MixtureSchedule([one.share for one in self.environments.values()])
        self._sampled = None if sampling is None else SampledTasks(sampling, self._schedule.share)
        # groups in each environment before an iteration, where they are sampled; the present one and the one before
        self._before = [(0, [0] * len(self._names))]

    @property
    def shares(self) -> dict[str, float]:
        """Share of each environment by name as it is set; they add up to 1."""
        return dict(zip(self.environments, self._schedule.share, strict=True))

    def shares_in(self, iteration: int) -> dict[str, float]:
        """Return the share of each environment in an iteration, the present one or the one before."""
        if self._sampled is None:
            return self.shares
        return dict(zip(self.environments, self._sampled.probabilities(iteration), strict=True))

    def starts(self, *, groups: int, iteration: int, seed: int) -> list[tuple[str, int]]:
        """Return each group's environment, and the number of the run's earlier groups in it.

        Args:
            groups: Number of groups of a rollout.
            iteration: Number of the iteration.
            seed: Seed of the run.
        """
        if self._sampled is None:
            first = iteration * groups
            places = map(self._schedule.place, range(first, first + groups))
            return [(self._names[place.environment], place.number) for place in places]
        counts = [*next(counts for first, counts in reversed(self._before) if first <= iteration)]
        starts = []
        for task in self._sampled.of_groups(groups=groups, iteration=iteration, seed=seed):
            starts.append((self._names[task], counts[task]))
            counts[task] += 1
        return starts

    def _own(self, name: str, *, groups: int, iteration: int, seed: int) -> list[int]:
        """Return the groups of a rollout that play an environment, in order."""
        starts = self.starts(groups=groups, iteration=iteration, seed=seed)
        return [group for group, (own, _) in enumerate(starts) if own == name]

    def _curricula(self) -> Iterator[tuple[str, TaskChoice]]:
        for name, one in self.environments.items():
            if one.curriculum is not None:
                yield name, one.curriculum

    def options_for(
        self, group: int, *, groups: int, iteration: int, seed: int
    ) -> Mapping[str, object] | None:
        """Return the reset options of a group by the curriculum of its environment."""
        name, _ = self.starts(groups=groups, iteration=iteration, seed=seed)[group]
        curriculum = self.environments[name].curriculum
        if curriculum is None:
            return None
        own = self._own(name, groups=groups, iteration=iteration, seed=seed)
        return curriculum.options_for(
            own.index(group), groups=len(own), iteration=iteration, seed=derive_seed(seed, name)
        )

    def observe_played(
        self, trajectories: Sequence[Trajectory], *, groups: int, iteration: int, seed: int
    ) -> None:
        """Let each curriculum take note of this rank's episodes in its environment. All ranks must call it."""
        for name, curriculum in self._curricula():
            own = self._own(name, groups=groups, iteration=iteration, seed=seed)
            played = [
                replace(one, group=one.seats * own.index(one.game % groups) + one.seat)
                for one in trajectories
                if one.environment == name
            ]
            curriculum.observe_played(
                played, groups=len(own), iteration=iteration, seed=derive_seed(seed, name)
            )
        if self._sampled is not None:
            starts = self.starts(groups=groups, iteration=iteration, seed=seed)
            counts = dict(zip(self._names, self._before[-1][1], strict=True))
            counts |= {name: number + 1 for name, number in starts}
            self._before = [self._before[-1], (iteration + 1, [*counts.values()])]
            numbered = [(self._names.index(str(one.environment)), one) for one in trajectories]
            self._sampled.observe(numbered, iteration=iteration, key="env.sampling: a mixture")

    def metrics(self, iteration: int) -> dict[str, float]:
        """Return the metrics of each environment's curriculum, named after it, and its share where that changes."""
        shares = {} if self._sampled is None else self.shares_in(iteration)
        return {f"{name}/share": share for name, share in shares.items()} | {
            f"{name}/{metric}": value
            for name, curriculum in self._curricula()
            for metric, value in curriculum.metrics(iteration).items()
        }

    def state_dict(self) -> dict[str, object]:
        """Return the state of the curricula and the sampling, and the shares that the schedule follows from."""
        sampled = None
        if self._sampled is not None:
            sampled = self._sampled.state_dict() | {"before": self._before}
        return {
            "sampling": sampled,
            "shares": self.shares,
            "curricula": {name: one.state_dict() for name, one in self._curricula()},
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`.

        Raises:
            RolloutError: The checkpoint has other environments or shares, or only one of both samples.
        """
        if state.get("shares") != self.shares:
            raise RolloutError(
                f"env.environments: the checkpoint has the shares {state.get('shares')}, and {self.shares} are set; "
                "set those of the run, or start another"
            )
        sampled: Mapping[str, Any] | None = state.get("sampling")  # type: ignore[assignment]
        if (sampled is None) != (self._sampled is None):
            does, remedy = ("does not sample", "null") if sampled is None else ("samples", "…")
            raise RolloutError(
                f"env.sampling: the checkpoint's run {does} its environments by their success; set "
                f"env.sampling={remedy}, or start another run"
            )
        if sampled is not None and self._sampled is not None:
            self._sampled.load_state_dict(sampled)
            self._before = [(first, [*counts]) for first, counts in sampled["before"]]
        curricula: Mapping[str, Mapping[str, object]] = state["curricula"]  # type: ignore[assignment]
        for name, curriculum in self._curricula():
            if name in curricula:
                restore(curriculum, curricula[name], key=f"env.environments.{name}.curriculum")


class MixedDemonstrationDataModule(WarmStartDataModule):
    """Serve the demonstrations of several environments, each played by its own policy, as minibatches.

    Args:
        proxy: Contexts of the run.
        parts: Demonstrations by the name of their environment.
        settings: Number of steps, and the discount; None for the defaults.
        update: Sizes of microbatches; None for the defaults.
        seed: Seed of the run.
    """

    @checked
    def __init__(
        self,
        proxy: AgentProxy[ContextManager],
        *,
        parts: Mapping[str, DemonstrationDataModule],
        settings: WarmStartSettings | None = None,
        update: UpdateSettings | None = None,
        seed: int,
    ) -> None:
        super().__init__(proxy, settings=settings, update=update, seed=seed)
        self.parts = dict(parts)

    def setup(self, stage: str) -> None:
        """Play this rank's demonstrations, one environment after another."""
        super().setup(stage)
        if self.batch is not None:
            return
        trajectories: list[Trajectory] = []
        for name, part in self.parts.items():
            trajectories += part.played()
            self.statistics |= {f"{name}/{key}": value for key, value in part.statistics.items()}
        self.take(trajectories)
