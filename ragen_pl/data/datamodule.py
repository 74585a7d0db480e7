"""RolloutDataModule: each iteration's fresh trajectories for the update, fixed validation sets for validation."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from ragen_pl.algorithms.group_filter import GroupFilter
from ragen_pl.base.checked import checked
from ragen_pl.base.distributed import (
    all_ranks_do,
    gather_over_ranks,
    rank,
    sum_over_ranks,
    world_size,
)
from ragen_pl.base.seeding import derive_seed
from ragen_pl.checkpoints.rank_states import RankStatesError, save_rank_states
from ragen_pl.data.ahead import RolloutAhead
from ragen_pl.data.batch import TrajectoryBatch
from ragen_pl.data.collate import as_dummy_batch, collate
from ragen_pl.data.curriculum import TaskChoice
from ragen_pl.data.failures import UsableEpisodes, seats_without_turn, too_few, usable_episodes
from ragen_pl.data.group_selection import GroupSelection, select_groups
from ragen_pl.data.loader import MinibatchDataModule, MinibatchLoader
from ragen_pl.data.rollout_module import AsyncRolloutModule, RolloutModule
from ragen_pl.data.settings import IterationSettings, UpdateSettings
from ragen_pl.data.validation import ValidationLoader, ValidationSet
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import RolloutEngine, kept_ids_problem, resent_by
from ragen_pl.environments.manager import EpisodeSpec
from ragen_pl.metrics.failures import FailureStatistics
from ragen_pl.metrics.rollout import RolloutStatistics, comparable
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.hint import UNHINTED
from ragen_pl.rewards.shaping import RewardFunction, check_terms
from ragen_pl.rollout.proxy import AgentProxy, Progress
from ragen_pl.rollout.responders import EngineResponder, Responder
from ragen_pl.trajectory import Trajectory

if TYPE_CHECKING:
    from ragen_pl.data.mixture import Mixture
    from ragen_pl.data.opponents import Opponents
    from ragen_pl.environments.mixture import EnvironmentMixture

log = logging.getLogger(__name__)


class RolloutDataModule(MinibatchDataModule):
    """Collect trajectories and serve them as minibatches.

    Args:
        proxy: Plays training episodes.
        validation_sets: Validation sets, the main one first.
        iteration: Episodes of an iteration; None for the defaults. With `iterations_ahead` the module has to follow
            `AsyncRolloutModule`.
        update: Passes and minibatches of an iteration's update; None for the defaults.
        seed: Seed of the run.
        held_out: Keep the initial states of the first validation set out of training.
        curriculum: Chooses initial states by the success so far, None for none.
        rewards: Reward functions, applied in order to each rollout.
        group_filter: Chooses the groups that are trained on; None for all.
        observations: Label the text between responses, which lets masks include it (RICO).
        text: Label the environment's text that follows responses, which the loss predicts (ECHO).
        mixture: Environments of a run with several, in place of `curriculum` and `rewards`; None for one environment.
            The proxy plays in an `EnvironmentMixture`, and each validation set is that of one of them.
        opponents: Earlier policies that play other seats of games; None for the present policy in all seats. The module
            has to follow `PlaysOpponents`.
    """

    @checked
    def __init__(
        self,
        proxy: AgentProxy[ContextManager],
        *,
        validation_sets: Sequence[ValidationSet] = (),
        iteration: IterationSettings | None = None,
        update: UpdateSettings | None = None,
        seed: int = 0,
        held_out: bool = True,
        curriculum: TaskChoice | None = None,
        rewards: Sequence[RewardFunction] = (),
        group_filter: GroupFilter | None = None,
        observations: bool = False,
        text: bool = False,
        mixture: Mixture | None = None,
        opponents: Opponents | None = None,
    ) -> None:
        super().__init__(update or UpdateSettings())
        self.settings = iteration or IterationSettings()
        ahead = self.settings.iterations_ahead
        if ahead and proxy.context.leave_out:
            raise ValueError(
                f"iterations_ahead={ahead}: leave_out scores prompts with the weights that are trained; "
                "set iterations_ahead=0, or a context without leave_out"
            )
        self.group_filter = group_filter or GroupFilter()
        if opponents is not None:
            others = {
                "rollout.iterations_ahead": ahead,
                "context.leave_out": proxy.context.leave_out,
                "algorithm.filter.resample": self.group_filter.resample,
                "env=mixture": mixture is not None,
            }
            opponents.check(seats=None, groups=self.settings.groups, others=others)
        self.opponents = opponents
        self.proxy, self.validation_sets = proxy, list(validation_sets)
        self.seed = seed
        self.held_out = held_out
        self.mixture = mixture
        self.curriculum = curriculum if mixture is None else mixture
        self.rewards = list(rewards)
        self.observations, self.text = observations, text
        self.buffer: TrajectoryBatch | None = None
        self.metrics: dict[str, float] = {}
        self._iteration = -1
        self._engine: RolloutEngine | None = None
        self._resent, self._draws = 0, torch.zeros(2, dtype=torch.int64)
        # of the minibatches of a buffer that a checkpoint held
        self._order: dict[str, Any] | None = None
        self._ahead = RolloutAhead(ahead, self._reward)

    def setup(self, stage: str) -> None:
        """Exclude the initial states of the first validation set from training."""
        super().setup(stage)
        environments = self.proxy.environments
        if self.mixture is not None:
            keys_by_name = {
                one.name: one.held_out_keys() for one in self.validation_sets if one.keeps_states
            }
            mixed = cast("EnvironmentMixture", environments).with_held_out(keys_by_name)
            self.proxy = replace(self.proxy, environments=mixed)
            return
        is_set = environments.held_out or environments.held_out_fraction is not None
        if self.held_out and self.validation_sets and not is_set:
            keys = self.validation_sets[0].held_out_keys()
            # a copy, since the validation set may play in the same environments
            self.proxy = replace(self.proxy, environments=environments.holding_out(keys))

    def episode_specs(self, iteration: int, *, attempt: int = 0) -> list[EpisodeSpec]:
        """Return this rank's episodes of an iteration: every world_size-th group, whole.

        Args:
            iteration: Number of the iteration, from 0.
            attempt: Number of earlier rollouts of the iteration; their groups have the lower numbers.
        """
        specs, starts = [], list[tuple[str, int]]()
        if self.mixture is not None:
            starts = self.mixture.starts(
                groups=self.settings.groups, iteration=iteration, seed=self.seed
            )
        for number in range(rank(), self.settings.groups, world_size()):
            options, group = None, attempt * self.settings.groups + number
            if self.curriculum is not None:
                options = self.curriculum.options_for(
                    number, groups=self.settings.groups, iteration=iteration, seed=self.seed
                )
            environment: str | None = None
            key: tuple[int | str, ...] = (iteration, group)
            if starts:
                environment, count = starts[number]
                key = (environment, count, attempt)
            seed = derive_seed(self.seed, "environment", *key)
            specs += [
                EpisodeSpec(
                    group=group,
                    member=member,
                    seed=seed,
                    options=options,
                    held_out=False,
                    environment=environment,
                )
                for member in range(self.settings.group_size)
            ]
        return specs

    def collect(
        self,
        iteration: int,
        module: RolloutModule,
        *,
        progress: Progress | None = None,
    ) -> list[Trajectory]:
        """Play this rank's part of an iteration and fill the buffer; return the trajectories.

        Trajectories that the filter drops are returned and counted too, but not trained on. With `iterations_ahead`
        the rollout of the next iteration begins here, and goes on while this one trains.

        Raises:
            RolloutError: Failures leave too few episodes, see `FailureSettings`.
        """
        played = self._ahead.played(iteration, progress=progress)
        ahead = None if played is None else (played.trajectories, self._usable(played.trajectories))
        if ahead is not None and not self._is_enough(ahead[1], iteration):
            played = ahead = None
        trajectories: list[Trajectory] = []
        usable, attempts = UsableEpisodes(), 0
        rollouts = self._rollouts(module, iteration, ahead=ahead, progress=progress)
        for rollout, usable_of_rollout in rollouts:
            attempts += 1
            trajectories += rollout
            usable += usable_of_rollout
            self._measure(trajectories, usable, iteration)
            selection = select_groups(
                usable.trajectories,
                self.group_filter,
                returns=lambda trajectory: trajectory.reward,
                limit=self.settings.groups,
            )
            if selection.groups >= self.settings.groups:
                break
        # a later attempt measures all of them anew
        self._resent = 0 if self._engine is None else resent_by(self._engine) or 0
        self._draws = torch.tensor(self.proxy.environments.draws)
        self.metrics["trained_fraction"] = selection.episodes / usable.played
        if self.group_filter != GroupFilter():
            self.metrics |= selection.metrics | {"attempts": float(attempts)}
        if self.curriculum is not None:
            self.metrics |= self.curriculum.metrics(iteration)
            self.curriculum.observe_played(
                trajectories, groups=self.settings.groups, iteration=iteration, seed=self.seed
            )
        if self.opponents is not None:
            self.metrics |= self.opponents.metrics()
        batch = self._collated(selection, iteration)
        if self._ahead.max_staleness:
            staleness = 0 if played is None else played.staleness
            self.metrics["staleness"] = staleness / attempts
            self.buffer = self._prepare_and_begin_next(
                module, batch, iteration, stale=staleness > 0
            )
        else:
            self.buffer = module.prepare(batch)
        self._iteration = iteration
        return trajectories

    def _rollouts(
        self,
        module: RolloutModule,
        iteration: int,
        *,
        ahead: tuple[list[Trajectory], UsableEpisodes] | None,
        progress: Progress | None,
    ) -> Iterator[tuple[list[Trajectory], UsableEpisodes]]:
        """Yield the rollouts of an iteration with the usable episodes of each, later ones if the filter asks for them.

        Args:
            module: Module whose present weights sample.
            iteration: Number of the iteration.
            ahead: The first one, if it has been played ahead.
            progress: See `AgentProxy.rollout`.
        """
        responder: Responder | None = None
        opponents = self.opponents
        for attempt in range(1 + self.group_filter.resample):
            if ahead is not None and attempt == 0:
                yield ahead
                continue
            if responder is None:
                responder = self._responder(module.rollout_engine(), module.global_step)
                if opponents is not None:
                    other = self._opponents_responder(opponents, module, iteration)
                    responder = opponents.responder(responder, other)
            play = partial(
                self.proxy.rollout,
                responder,
                self.episode_specs(iteration, attempt=attempt),
                seed_key=self._seed_key(iteration),
                progress=progress,
            )
            # a rank whose rollout fails, or is stopped, does not leave the others waiting
            played = all_ranks_do(play)
            own = played if opponents is None else opponents.own(played)
            usable = self._usable(own)
            if not self._is_enough(usable, iteration):
                played = all_ranks_do(play)
                own = played if opponents is None else opponents.own(played)
                usable = self._usable(own)
            if opponents is not None:
                opponents.note(played)
            self._reward(own)
            yield own, usable

    def _opponents_responder(
        self, opponents: Opponents, module: RolloutModule, iteration: int
    ) -> EngineResponder:
        """Return the responder of an iteration's opponent. All ranks must call it."""
        # of games against them only
        from ragen_pl.data.opponents import PlaysOpponents

        if not isinstance(module, PlaysOpponents):
            raise TypeError(
                f"opponents: {type(module).__name__} has no opponent_engine; give it one "
                "(ragen_pl.data.opponents.PlaysOpponents), or leave opponents out"
            )
        weights = opponents.begin(iteration, module, groups=self.settings.groups, seed=self.seed)
        return EngineResponder(
            engine=module.opponent_engine(weights),
            context=self.proxy.context,
            version=module.global_step,
        )

    def _prepare_and_begin_next(
        self, module: RolloutModule, batch: TrajectoryBatch, iteration: int, *, stale: bool
    ) -> TrajectoryBatch:
        """Prepare a batch while the rollout of the next iteration begins."""
        if not isinstance(module, AsyncRolloutModule):
            raise TypeError(
                f"rollout.iterations_ahead={self._ahead.max_staleness}: {type(module).__name__} has no "
                "async_rollout_engine; give it one (ragen_pl.data.datamodule.AsyncRolloutModule), or set "
                "iterations_ahead=0"
            )
        self._ahead.drop()
        truncation = self.proxy.truncation
        if truncation is not None and batch.kept_ids is None and len(batch.samples):
            name = type(self._engine).__name__
            raise RolloutError(kept_ids_problem(name, truncation))
        if not self._is_last(iteration):
            from ragen_pl.rollout.background import BackgroundRollout

            engine = module.async_rollout_engine(wait_for_rollout=self._ahead.wait)
            rollout = BackgroundRollout(
                self.proxy,
                self._responder(engine, module.global_step),
                self.episode_specs(iteration + 1),
                seed_key=self._seed_key(iteration + 1),
            )
            self._ahead.begin(iteration + 1, rollout, weights_of=iteration)
        return module.prepare(batch, stale=stale)

    def _is_last(self, iteration: int) -> bool:
        """Return whether the Trainer's limits end the run with this iteration."""
        trainer = self.trainer
        if trainer is None:
            return False
        steps = trainer.global_step + self.update.epochs * self.update.minibatches
        by_steps = trainer.max_steps != -1 and steps >= trainer.max_steps
        by_iterations = trainer.max_epochs not in (None, -1) and iteration + 1 >= trainer.max_epochs
        return by_steps or by_iterations

    def _responder(self, engine: RolloutEngine, version: int) -> EngineResponder:
        self._engine = engine
        return EngineResponder(engine=engine, context=self.proxy.context, version=version)

    def _seed_key(self, iteration: int) -> tuple[int | str, ...]:
        return (self.seed, "sample", iteration)

    def _reward(self, trajectories: list[Trajectory]) -> None:
        rewards: dict[str | None, Sequence[RewardFunction]] = {None: self.rewards}
        if self.mixture is not None:
            rewards = {name: one.rewards for name, one in self.mixture.environments.items()}
        for name, functions in rewards.items():
            own = [one for one in trajectories if one.environment == name]
            for reward in functions:
                reward(own, gather=gather_over_ranks)
                check_terms(own, of=reward)

    def drop_ahead(self) -> None:
        """Drop the rollout ahead after the policy's weights were replaced. All ranks must call it."""
        # the next rollout plays in the same environments
        self._ahead.drop(wait=True)

    def teardown(self, stage: str) -> None:
        """Stop the rollout ahead."""
        super().teardown(stage)
        self._ahead.drop()

    def _usable(self, played: Sequence[Trajectory]) -> UsableEpisodes:
        return usable_episodes(
            played,
            self.proxy.failures,
            leave_out_user_errors=self.settings.leave_out_user_errors,
        )

    def _is_enough(self, usable: UsableEpisodes, iteration: int) -> bool:
        """Return whether enough episodes of a rollout are usable; the same on every rank."""
        enough = usable.is_enough(self.proxy.failures)
        if not enough and rank() == 0:
            log.warning(
                "iteration %d: %d of %d episodes failed; it is played once more",
                iteration + 1,
                usable.failed,
                usable.played,
            )
        return enough

    def _measure(
        self, trajectories: list[Trajectory], usable: UsableEpisodes, iteration: int
    ) -> None:
        """Set the metrics of an iteration; it must have enough usable episodes."""
        failures = self.proxy.failures
        if not usable.is_enough(failures):
            raise too_few(usable, trajectories, failures, iteration=iteration)
        failure_statistics = FailureStatistics()
        failure_statistics.update(trajectories)
        self.metrics = failure_statistics.compute() | self._played_metrics(trajectories)
        if self.metrics.get("hinted_fraction") == 0:
            raise RolloutError(
                f"algorithm.loss.kl.hint: no turn of the iteration has a hint, {UNHINTED}"
            )
        self.metrics["dropped_groups"] = float(usable.dropped_groups)
        resent = None if self._engine is None else resent_by(self._engine)
        if resent is not None:
            self.metrics["resent"] = float(sum_over_ranks(torch.tensor(resent - self._resent)))
        draws = torch.tensor(self.proxy.environments.draws) - self._draws
        redraws, resets = sum_over_ranks(draws).tolist()
        self.metrics["redraws"] = redraws / max(resets, 1)
        if (silent := seats_without_turn(trajectories)) is not None:
            self.metrics["seats_without_turn"] = silent

    def _played_metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        statistics = RolloutStatistics()
        statistics.update(trajectories)
        metrics = statistics.compute()
        if self.mixture is None:
            return metrics
        metrics = comparable(metrics)
        for name in self.mixture.environments:
            own = RolloutStatistics()
            own.update([one for one in trajectories if one.environment == name])
            values = own.compute()
            # one that this iteration did not play has none
            if values["episodes"] or values["failed_episodes"]:
                metrics |= {f"{name}/{metric}": value for metric, value in values.items()}
        return metrics

    def _collated(self, selection: GroupSelection, iteration: int) -> TrajectoryBatch:
        bundle = self.proxy.context.bundle
        batch = collate(
            selection.trajectories,
            bundle,
            weights=selection.weights,
            observations=self.observations,
            text=self.text,
            shares=None if self.mixture is None else self.mixture.shares_in(iteration),
            hinted=self.proxy.hint is not None,
        )
        return as_dummy_batch(batch) if selection.is_dummy else batch

    def has_buffer(self, iteration: int) -> bool:
        """Return whether the buffer holds this iteration's samples."""
        return self.buffer is not None and self._iteration == iteration

    def drop_buffer(self) -> None:
        """Drop the samples."""
        self.buffer = self._order = None

    def train_dataloader(self) -> MinibatchLoader:
        """Return the update phase's loader over the buffer."""
        if self.buffer is None:
            raise RuntimeError(
                "there are no trajectories yet; train with the RolloutUpdate callback"
            )
        return self.minibatches_in(self._order or self._present_order(), self.buffer)

    def _present_order(self) -> dict[str, Any]:
        return self.order(
            epochs=self.update.epochs,
            minibatches=self.update.minibatches,
            seed_key=(self.seed, self._iteration),
        )

    def val_dataloader(self) -> list[ValidationLoader]:
        """Return a loader for each validation set."""
        return [ValidationLoader(validation_set) for validation_set in self.validation_sets]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that an exact resume needs, after the end of a rollout ahead.

        All ranks must call it: each has its own buffer.
        """
        return {
            "iteration": self._iteration,
            "metrics": self.metrics,
            "curriculum": None if self.curriculum is None else self.curriculum.state_dict(),
            "opponents": None if self.opponents is None else self.opponents.state_dict(),
            # all ranks drop theirs together
            "buffers": [None] * world_size()
            if self.buffer is None
            else save_rank_states(self.buffer.state_dict(), name="samples"),
            "order": None if self.buffer is None else self._order or self._present_order(),
            "ahead": self._ahead.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`; the buffer only if the number of ranks is the same."""
        from ragen_pl.base.restoring import restore

        self._iteration, self.metrics = state_dict["iteration"], state_dict["metrics"]
        self._ahead.load_state_dict(state_dict.get("ahead"))
        if self.curriculum is not None and state_dict["curriculum"] is not None:
            restore(self.curriculum, state_dict["curriculum"], key="curriculum")
        if self.opponents is not None and state_dict.get("opponents") is not None:
            restore(self.opponents, state_dict["opponents"], key="opponents")
        buffers = state_dict["buffers"]
        if len(buffers) != world_size() and buffers[0] is not None:
            raise RankStatesError(
                f"the checkpoint was written inside an update on {len(buffers)} ranks and cannot continue on "
                f"{world_size()}; resume on as many, or from a checkpoint written at an iteration's end"
            )
        own = buffers[rank()] if len(buffers) == world_size() else None
        self.buffer = None if own is None else TrajectoryBatch.from_state_dict(own)
        # seed and update.* of the run may be others now, and the rest of the samples is not trained yet
        self._order = state_dict.get("order")
