"""Mixture: which environment each group of a run plays, and in which state it begins; demonstrations in several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ragen_pl.algorithms.mixture import MixtureSchedule
from ragen_pl.base.checked import checked
from ragen_pl.base.restoring import restore
from ragen_pl.base.seeding import derive_seed
from ragen_pl.data.curriculum import TaskChoice
from ragen_pl.data.demonstrations import DemonstrationDataModule, WarmStartDataModule
from ragen_pl.data.settings import UpdateSettings, WarmStartSettings
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
    """The environments of a run with several, whose groups follow `MixtureSchedule`.

    The seeds of an environment's groups come from its name and the number of its own groups before, so they do not
    depend on the other environments. Further rollouts of an iteration (`GroupFilter.resample`) play the environments
    of its first one again.

    Args:
        environments: Environments by name.

    Raises:
        ValueError: A share is negative, or all are 0.
    """

    def __init__(self, environments: Mapping[str, MixedEnvironment]) -> None:
        self.environments = dict(environments)
        self._names = [*environments]
        self._schedule = MixtureSchedule([one.share for one in self.environments.values()])

    @property
    def shares(self) -> dict[str, float]:
        """Share of each environment by name; they add up to 1."""
        return dict(zip(self.environments, self._schedule.share, strict=True))

    def start(self, group: int, *, groups: int, iteration: int) -> tuple[str, int]:
        """Return the environment of a group, and the number of the run's earlier groups in it.

        Args:
            group: Number of the group in a rollout, from 0.
            groups: Number of groups of a rollout.
            iteration: Number of the iteration.
        """
        place = self._schedule.place(iteration * groups + group)
        return self._names[place.environment], place.number

    def _own(self, name: str, *, groups: int, iteration: int) -> list[int]:
        """Return the groups of a rollout that play an environment, in order."""
        return [
            group
            for group in range(groups)
            if self.start(group, groups=groups, iteration=iteration)[0] == name
        ]

    def _curricula(self) -> Iterator[tuple[str, TaskChoice]]:
        for name, one in self.environments.items():
            if one.curriculum is not None:
                yield name, one.curriculum

    def options_for(
        self, group: int, *, groups: int, iteration: int, seed: int
    ) -> Mapping[str, object] | None:
        """Return the reset options of a group by the curriculum of its environment."""
        name, _ = self.start(group, groups=groups, iteration=iteration)
        curriculum = self.environments[name].curriculum
        if curriculum is None:
            return None
        own = self._own(name, groups=groups, iteration=iteration)
        return curriculum.options_for(
            own.index(group), groups=len(own), iteration=iteration, seed=derive_seed(seed, name)
        )

    def observe_played(
        self, trajectories: Sequence[Trajectory], *, groups: int, iteration: int, seed: int
    ) -> None:
        """Let each curriculum take note of this rank's episodes in its environment. All ranks must call it."""
        for name, curriculum in self._curricula():
            own = self._own(name, groups=groups, iteration=iteration)
            played = [
                replace(one, group=one.seats * own.index(one.game % groups) + one.seat)
                for one in trajectories
                if one.environment == name
            ]
            curriculum.observe_played(
                played, groups=len(own), iteration=iteration, seed=derive_seed(seed, name)
            )

    def metrics(self, iteration: int) -> dict[str, float]:
        """Return the metrics of each environment's curriculum, named after it."""
        return {
            f"{name}/{metric}": value
            for name, curriculum in self._curricula()
            for metric, value in curriculum.metrics(iteration).items()
        }

    def state_dict(self) -> dict[str, object]:
        """Return the state of the curricula, and the shares that the schedule follows from."""
        return {
            "shares": self.shares,
            "curricula": {name: one.state_dict() for name, one in self._curricula()},
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore `state_dict`.

        Raises:
            RolloutError: The checkpoint has other environments or shares.
        """
        if state.get("shares") != self.shares:
            raise RolloutError(
                f"env.environments: the checkpoint has the shares {state.get('shares')}, and {self.shares} are set; "
                "set those of the run, or start another"
            )
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
