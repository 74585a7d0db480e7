"""WarmStartDataModule: the samples of the warm start; DemonstrationDataModule: scripted, imperfect demonstrations."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from ragen_pl.base.checked import checked
from ragen_pl.base.distributed import gather_over_ranks, rank, sum_over_ranks, world_size
from ragen_pl.base.phases import phase
from ragen_pl.base.seeding import derive_seed
from ragen_pl.data.batch import TrajectoryBatch
from ragen_pl.data.collate import as_dummy_batch, collate, usable
from ragen_pl.data.loader import MinibatchDataModule, MinibatchLoader
from ragen_pl.data.settings import UpdateSettings, WarmStartSettings
from ragen_pl.engines.errors import RolloutError
from ragen_pl.environments.manager import EpisodeSpec
from ragen_pl.metrics.rollout import RolloutStatistics
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedPolicy, ScriptedResponder
from ragen_pl.trajectory import Trajectory

log = logging.getLogger(__name__)


class WarmStartDataModule(MinibatchDataModule):
    """Serve samples of expert or recorded turns as minibatches.

    Args:
        proxy: Environments and contexts.
        settings: Numbers of steps and samples; None for the defaults.
        update: Sizes of microbatches; None for the defaults.
        seed: Seed of the run.

    Attributes:
        batch: This rank's samples; None before `setup`.
        statistics: Metrics of the episodes.
    """

    def __init__(
        self,
        proxy: AgentProxy[ContextManager],
        *,
        settings: WarmStartSettings | None,
        update: UpdateSettings | None,
        seed: int,
    ) -> None:
        super().__init__(update or UpdateSettings())
        self.proxy, self.settings, self.seed = proxy, settings or WarmStartSettings(), seed
        self.batch: TrajectoryBatch | None = None
        self.statistics: dict[str, float] = {}

    def report_long(self, trajectories: Sequence[Trajectory]) -> None:
        """Warn of responses that a policy could not sample to their end."""
        lengths = [len(turn.response_ids) for one in trajectories for turn in one.turns]
        limit = self.proxy.response_limit(self.proxy.environments)
        longer = sum(length > limit for length in lengths)
        if longer:
            log.warning(
                "rollout.max_response_tokens=%d: %d of %d demonstrated responses are longer and would be cut, the "
                "longest has %d tokens; raise it",
                limit,
                longer,
                len(lengths),
                max(lengths),
            )

    def take(self, trajectories: Sequence[Trajectory]) -> None:
        """Make the samples of this rank's episodes. All ranks must call it.

        A rank without a usable episode gets padding rows, so that it takes part in each step.

        Raises:
            RolloutError: No rank has a usable episode.
        """
        own = [trajectory for trajectory in trajectories if usable(trajectory)]
        firsts = [one for part in gather_over_ranks(own[:1]) for one in part]
        if not firsts:
            raise RolloutError("no episode of the warm start can be trained on")
        self.batch = collate(own or firsts[:1], self.proxy.context.bundle)
        set_discounted_returns(self.batch, gamma=self.settings.gamma)
        if not own:
            self.batch = as_dummy_batch(self.batch)

    def train_dataloader(self) -> MinibatchLoader:
        """Return the loader over all samples."""
        assert self.batch is not None
        # over all ranks: episodes differ in length, and all ranks take the same number of steps
        own = len(self.batch.samples) if len(self.batch.episodes.turns) else 0
        samples = int(sum_over_ranks(torch.tensor(own)))
        minibatches = max(1, -(-samples // self.settings.batch_size))
        return self.minibatches_of(
            self.batch,
            epochs=math.ceil(self.settings.steps / minibatches),
            minibatches=minibatches,
            seed_key=(self.seed, "demonstrations"),
        )


class DemonstrationDataModule(WarmStartDataModule):
    """Play demonstrations once and serve their turns as minibatches.

    Args:
        proxy: Plays the demonstrations.
        policy: Chooses their actions.
        settings: Numbers of demonstrations and steps, and the discount; None for the defaults.
        update: Sizes of microbatches; None for the defaults.
        seed: Seed of the run.
    """

    @checked
    def __init__(
        self,
        proxy: AgentProxy[ContextManager],
        *,
        policy: ScriptedPolicy,
        settings: WarmStartSettings | None = None,
        update: UpdateSettings | None = None,
        seed: int,
    ) -> None:
        super().__init__(proxy, settings=settings, update=update, seed=seed)
        self.policy = policy

    def setup(self, stage: str) -> None:
        """Play this rank's demonstrations."""
        super().setup(stage)
        if self.batch is None:
            self.take(self.played())

    def played(self) -> list[Trajectory]:
        """Play this rank's demonstrations and return them, with `statistics` set. All ranks must call it.

        Raises:
            RolloutError: Every one failed.
        """
        stages = self.settings.stages or [{}]
        specs = [
            EpisodeSpec(
                group=number,
                member=0,
                seed=derive_seed(self.seed, "demonstration", number),
                options=stages[number % len(stages)] or None,
                held_out=False,
            )
            for number in range(rank(), self.settings.episodes, world_size())
        ]
        with phase("demonstrations of the warm start", len(specs), shown=rank() == 0) as progress:
            trajectories = self.proxy.rollout(
                ScriptedResponder(policy=self.policy),
                specs,
                seed_key=(self.seed, "demonstrator"),
                progress=progress,
            )
        statistics = RolloutStatistics()
        statistics.update(trajectories)
        self.statistics = statistics.compute()
        if self.statistics["failed"] == 1.0:
            raise RolloutError(
                f"every demonstration failed; the first with {trajectories[0].error}"
            )
        self._report(trajectories)
        return trajectories

    def _report(self, trajectories: Sequence[Trajectory]) -> None:
        """Warn of episodes without a success, and of responses that a policy could not sample to their end."""
        if self.statistics["success"] == 0 and rank() == 0:
            log.warning(
                "warm_start.demonstrator: no success in %d episodes, mean return %.3g; check info['success'] of %s "
                "and env.max_turns; until a validation has a success, best.ckpt goes by the return",
                self.statistics["episodes"],
                self.statistics["return"],
                self.proxy.environments.target,
            )
        self.report_long(trajectories)


def set_discounted_returns(batch: TrajectoryBatch, *, gamma: float) -> None:
    """Set each sampled token's return to its turn's discounted return-to-go, Σ_k gamma^(k-t) r_k.

    Turns that do not advance, such as summaries, are not counted in the exponent.
    """
    rewards = batch.episodes.turn_rewards
    discounts = torch.where(batch.episodes.advances, gamma, 1.0)
    returns = torch.zeros(rewards.shape[0], rewards.shape[1] + 1)
    for turn in reversed(range(rewards.shape[1])):
        returns[:, turn] = rewards[:, turn] + discounts[:, turn] * returns[:, turn + 1]
    samples = batch.samples
    sampled = samples.turn >= 0
    samples.returns = torch.where(
        sampled, returns[samples.episode[:, None], samples.turn.clamp(min=0)], 0.0
    )
