"""AgentModule: policy and critic composed for multi-turn RL.

It rolls out with the policy, assigns credit before an update, computes the loss of the update's steps and logs
metrics. Formulas are in `ragen_pl.algorithms`; the config chooses among them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch.utilities import move_data_to_device
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from ragen_pl.algorithms.credit import Estimator
from ragen_pl.algorithms.mismatch import Correction, TruncatedWeights
from ragen_pl.algorithms.normalization import RewardNormalizer
from ragen_pl.base.distributed import any_over_ranks, gather_over_ranks, rank
from ragen_pl.data.batch import Minibatch, TrajectoryBatch
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.data.validation import ValidationChunk
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import (
    EngineFactory,
    ReadsValues,
    RolloutEngine,
    check_asynchronous,
    is_shared,
)
from ragen_pl.metrics.rollout import RolloutStatistics, worst_of
from ragen_pl.metrics.update import PreparationStatistics, UpdateStatistics
from ragen_pl.models.dropout import has_dropout
from ragen_pl.models.truncation import Truncation
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.guard import GuardedModule
from ragen_pl.modules.losses import LossResult, UpdateLoss
from ragen_pl.modules.masking import Masks
from ragen_pl.modules.optimizers import MasterWeights, OptimizerFactory, schedule_by_iteration
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.preparation import add_scores, check_mismatch, prepare_batch, scores_needed
from ragen_pl.modules.reference import FrozenCopy
from ragen_pl.modules.scorer import Scorer
from ragen_pl.modules.settings import IterationData, OptimizationSettings
from ragen_pl.modules.sharding import GatheredPolicy, data_mesh, is_sharded, load_engine
from ragen_pl.trajectory import Trajectory

log = logging.getLogger(__name__)
_CORRECTED = (
    "policy loss: its old log-probs are the trainer's, with truncated importance weights for the engine's, since %s; "
    "algorithm.loss.mismatch=null takes the engine's"
)
_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class AgentModule(GuardedModule):
    """Train a policy, and a critic where the estimator needs one, on its own trajectories.

    Args:
        policy: Policy that plays and is trained.
        critic: Critic; None for estimators that need no values.
        estimator: Estimator of advantages and returns.
        masks: M_loss and M_adv.
        loss: Loss of the update's steps.
        optimizer: Builds one optimizer from the named parameter groups `policy` and `critic`.
        engine: Builds the rollout engine of the policy.
        normalizer: Normalizer of the episodes' returns; None to leave them. In a mixture each environment has a copy.
        optimization: Learning rates over iterations, and precision of the weights; None for the defaults.
        critic_learning_rate: Learning rate of the critic; None for the policy's.
        update: Sizes of forward passes, and steps that may be skipped; None for the defaults.
        truncation: Ids that the rollouts' sampling keeps; None for all.
        environments: Share of each environment of a mixture by name, in the order of the batches; empty for one
            environment. Returns are normalized in each apart, and validation compares those with a share above 0.
    """

    def __init__(
        self,
        policy: PolicyModule,
        critic: CriticModule | None,
        *,
        estimator: Estimator,
        masks: Masks,
        loss: UpdateLoss,
        optimizer: OptimizerFactory,
        engine: EngineFactory,
        normalizer: RewardNormalizer | None = None,
        optimization: OptimizationSettings | None = None,
        critic_learning_rate: float | None = None,
        update: UpdateSettings | None = None,
        truncation: Truncation | None = None,
        environments: Mapping[str, float] | None = None,
    ) -> None:
        update = update or UpdateSettings()
        super().__init__(max_skipped_steps=update.max_skipped_steps)
        if estimator.needs_values and critic is None:
            raise ValueError(f"{type(estimator).__name__} needs a critic; set algorithm.critic")
        self.policy, self.critic = policy, critic if estimator.needs_values else None
        self.reference = None if loss.reference is None else loss.reference.build(policy)
        self.environments = dict(environments or {})
        self.normalizers = [
            copy.deepcopy(normalizer or RewardNormalizer())
            for _ in range(max(1, len(self.environments)))
        ]
        self.estimator, self.masks, self.loss = estimator, masks, loss
        self.optimizer_factory = optimizer
        self.optimization = optimization or OptimizationSettings()
        self.critic_learning_rate = critic_learning_rate
        self.tokens_per_forward = update.tokens_per_forward
        self.always_score = update.scoring == "always"
        self.max_mismatch = update.max_mismatch
        self._mismatch_is_rounding = False  # of the present samples
        self._adds_scores = False  # in the first optimizer step: by the weights that sampled
        self.truncation = truncation
        self.statistics = UpdateStatistics()
        self.preparation = PreparationStatistics()
        self.importance: ImportanceStatistics | None = None
        if masks.importance is not None:
            from ragen_pl.metrics.importance import ImportanceStatistics

            self.importance = ImportanceStatistics()
        self.validation_statistics: dict[str, RolloutStatistics] = {}
        self.engine_factory = engine
        self._engine: RolloutEngine | None = None
        # ends the rollout for which the engine is lent
        self._wait_for_rollout: Callable[[], None] | None = None
        # the policy for the engine, where its own weights are sharded
        self._gathered: GatheredPolicy | None = None
        # its weights are in the DataModule's state; inside of a tuple it is no part of this module
        self._opponent: tuple[PolicyModule, RolloutEngine] | None = None

    def train(self, mode: bool = True) -> AgentModule:
        """Set the mode of policy and critic; the reference stays in eval mode."""
        super().train(mode)
        if isinstance(self.reference, torch.nn.Module):
            self.reference.eval()
        return self

    # ---- precision

    @property
    def computes_in_float32(self) -> bool:
        """Whether the forward passes round nothing to a lower precision."""
        dtypes = {parameter.dtype for parameter in self.policy.parameters()}
        return self.trainer.precision == "32-true" and dtypes == {torch.float32}

    @property
    def correction(self) -> Correction | None:
        """Correction of the engine's distribution to the trainer's; see `UpdateLoss.mismatch`."""
        mismatch = self.loss.mismatch
        if mismatch != "auto":
            return mismatch
        exact = self._engine is None or self._engine.exact
        return None if exact and self.computes_in_float32 else TruncatedWeights()

    def setup(self, stage: str) -> None:
        """Take the fingerprints, then store the reference in the dtype that it is computed in."""
        super().setup(stage)
        self.cast_reference()

    def configure_model(self) -> None:
        """Shard policy, critic and reference if the Trainer's strategy shards models."""
        if self.device_mesh is None or is_sharded(self.policy):
            return
        mesh = data_mesh(self.device_mesh)
        self._gathered = GatheredPolicy(self.policy)
        if isinstance(self.reference, PolicyModule):
            # before the policy: they may share frozen weights
            self.reference.shard(mesh, keep_head=self.loss.reads_reference_head)
        self.policy.shard(mesh)
        if self.critic is not None:
            self.critic.shard(mesh)

    def cast_reference(self) -> None:
        """Round the weights of the reference as autocast would at each use."""
        dtype = _AUTOCAST.get(self.trainer.precision)
        if dtype is not None and self.reference is not None and self.loss.reference is not None:
            self.loss.reference.store(self.reference, self.policy, dtype)

    def on_fit_start(self) -> None:
        """Log the changes that the run's precision has made."""
        if rank() > 0:
            return
        if isinstance(self.optimizers(use_pl_optimizer=False), MasterWeights):
            log.info(
                "optimizer: keeps float32 copies of the weights, which are in bfloat16; master_weights=false leaves "
                "this to an optimizer of its own"
            )
        if self.loss.mismatch == "auto" and self.correction is not None:
            log.info(_CORRECTED, "compute is not in float32")

    # ---- rollout phase

    def rollout_engine(self) -> RolloutEngine:
        """Return the rollout engine with the present weights. All ranks must call it.

        Waits for the background rollout that uses the engine, if there is one.
        """
        if self._wait_for_rollout is not None:
            self._wait_for_rollout()
            self._wait_for_rollout = None
        policy = self._gathered or self.policy
        if self._engine is None:
            self._engine = self.engine_factory(policy, forward_context=self._forward_context)
            if self.computes_in_float32 and self.correction is not None and rank() == 0:
                log.info(_CORRECTED, "the rollout engine rounds otherwise")
        if isinstance(self._engine, ReadsValues):
            self._engine.read_values(self.critic if self._engine_reads_values else None)
        load_engine(self._engine, policy, version=self.global_step)
        return self._engine

    @property
    def _engine_reads_values(self) -> bool:
        """Whether the engine reads the critic's values, so that no pass before the update has to."""
        engine, critic = self._engine, self.critic
        return (
            critic is not None
            and critic.shares_trunk
            and not is_sharded(self.policy)
            and engine is not None
            and engine.exact
            and engine.in_place
            and isinstance(engine, ReadsValues)
            and self.computes_in_float32
            and not self.always_score
            # a pass that is needed anyway reads them too
            and not scores_needed(self.scorer, self.masks, self.correction, has_values=True)
        )

    @property
    def engine_is_shared(self) -> bool:
        """Whether ranks wait for each other in a rollout."""
        return self._engine is not None and is_shared(self._engine)

    def async_rollout_engine(self, *, wait_for_rollout: Callable[[], None]) -> RolloutEngine:
        """Return the engine with the policy's present weights, awake; see `AsyncRolloutModule`.

        Args:
            wait_for_rollout: Waits for the end of that rollout.

        Raises:
            ValueError: The engine can't sample while the policy trains, or the loss corrects for no older weights.
        """
        self.loss.require_correction()
        engine = self.rollout_engine()
        check_asynchronous(engine)
        self._wait_for_rollout = wait_for_rollout
        return engine

    def trained_weights(self) -> dict[str, Tensor]:
        """Return copies of the policy's present trained weights on the host, by name; see `PlaysOpponents`."""
        return self.policy.trained_weights()

    @torch.inference_mode(False)
    @torch.no_grad()
    def opponent_engine(self, weights: Mapping[str, Tensor]) -> RolloutEngine:
        """Return an engine of a copy of the policy with other trained weights; all ranks must call it.

        Args:
            weights: Those of `trained_weights` at an earlier time.

        Raises:
            ValueError: The weights are sharded, or the engine can't sample with a model in place.
        """
        if is_sharded(self.policy):
            raise ValueError(
                "opponents: the policy's weights are sharded; set trainer.strategy=ddp"
            )
        if self._opponent is None:
            copied = FrozenCopy().build(self.policy)
            assert isinstance(copied, PolicyModule)
            engine = self.engine_factory(copied, forward_context=self._forward_context)
            self._opponent = copied, engine
            if not engine.in_place:
                raise ValueError(
                    f"opponents: {type(engine).__name__} has a model of its own; set rollout/engine=transformers"
                )
        policy, engine = self._opponent
        for name, weight in weights.items():
            policy.get_parameter(name).copy_(weight)
        load_engine(engine, policy, version=self.global_step)
        return engine

    def _end_rollout(self) -> None:
        """Free the memory that only a rollout needs."""
        if self._engine is not None and self._wait_for_rollout is None:
            self._engine.sleep()
        if self._opponent is not None:
            self._opponent[1].sleep()
        if self._gathered is not None and not self._gathered.is_empty:
            self._gathered.release()

    def teardown(self, stage: str) -> None:
        """Close the rollout engine; a later rollout builds it again."""
        if self._engine is not None:
            self._engine.close()
            self._engine = self._wait_for_rollout = None
        if self._opponent is not None:
            self._opponent[1].close()
            self._opponent = None

    def _forward_context(self) -> Any:
        return self.trainer.precision_plugin.forward_context()

    def prepare(self, batch: TrajectoryBatch, *, stale: bool = False) -> TrajectoryBatch:
        """Fill in a batch's masks, values, reference log-probs, advantages and returns.

        Args:
            batch: Samples of an iteration.
            stale: Whether older weights have sampled some of them. `mismatch=auto` is then `TruncatedWeights`.

        Raises:
            ValueError: Older weights have sampled them, and the loss does not correct for it.
        """
        if stale:
            self.loss.require_correction()
        correction = self.correction or (TruncatedWeights() if stale else None)
        self._end_rollout()
        self.statistics.reset()
        self.policy.bundle.positions.take()
        self.begin_update()
        if self.importance is not None:
            self.importance.reset()
        batch = move_data_to_device(batch, self.device)
        # written responses have none, and all ranks score their samples or none does
        reads_values = self._engine_reads_values and not stale
        has_values = reads_values and not any_over_ranks(not batch.has_values)
        score = self.always_score or scores_needed(
            self.scorer, self.masks, correction, has_values=has_values
        )
        if self.reference is not None and self.loss.reference is not None:
            self.loss.reference.follow(self.reference, self.policy)
        with self._forward_context():
            self.preparation = prepare_batch(
                batch,
                self.scorer,
                estimator=self.estimator,
                masks=self.masks,
                tokens_per_forward=self.tokens_per_forward,
                normalizers=self.normalizers,
                importance=self.importance,
                correction=correction,
                score=score,
            )
        self._adds_scores = not score
        # a minibatch of the update is scored in train mode
        same_mode = not (self._adds_scores and has_dropout(self.policy.bundle.model))
        exact = self._engine is not None and self._engine.exact and self.computes_in_float32
        self._mismatch_is_rounding = exact and same_mode and not stale
        return move_data_to_device(batch, torch.device("cpu"))

    # ---- update phase

    @property
    def scorer(self) -> Scorer:
        """Policy, critic and reference."""
        return Scorer(self.policy, self.critic, self.reference, self.loss, self.truncation)

    def has_tokens(self, batch: Minibatch) -> Mapping[str, Tensor]:
        """Return whether the step has a token for the policy, and one for the critic."""
        return self.loss.has_tokens(batch, self.critic)

    def losses(self, batch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a minibatch's loss, of which the mean over ranks is the global one, and its sums."""
        result = self._result(batch)
        return result.loss * batch.scale, result.sums

    @property
    def separate_norm(self) -> float | None:
        """Largest norm of the gradient of the penalty on the divergence, if that is clipped by itself."""
        return self.loss.kl.clip_norm if self.loss.kl and self.loss.separates_kl else None

    def _result(self, batch: Minibatch) -> LossResult:
        scores = self.scorer.score_minibatch(batch)
        if self._adds_scores:
            add_scores(self.preparation, batch.samples, scores)
            self._adds_scores = not batch.ends_step
        return self.loss(scores, batch)

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        """Return the loss of a minibatch without its separate term, and count its sums."""
        result = self._result(batch)
        self.statistics.update({**result.sums, **self.policy.bundle.positions.take()})
        loss = result.loss
        if result.separate is not None:
            steps = self.trainer.accumulate_grad_batches
            self.separate.add(result.separate * batch.scale / steps, self)
            loss = loss - result.separate
        return loss * batch.scale

    def schedule_settings(self) -> dict[str, float]:
        """Return the settings of the schedule."""
        iterations = self.trainer.max_epochs
        return {
            "learning_rate_warm_up": self.optimization.learning_rate_warm_up,
            "learning_rate_end": self.optimization.learning_rate_end,
            "trainer.max_epochs": -1 if iterations is None else iterations,
        }

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return one optimizer with the groups `policy` and `critic`, and its schedule."""
        optimizer = self.build_optimizer()
        schedule = schedule_by_iteration(
            optimizer,
            iterations=self.trainer.max_epochs,
            warm_up=self.optimization.learning_rate_warm_up,
            end=self.optimization.learning_rate_end,
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "epoch", "name": "rate"},
        }

    # ---- metrics

    def on_train_epoch_end(self) -> None:
        """Log the iteration's metrics."""
        datamodule: IterationData = self.trainer.datamodule  # type: ignore[attr-defined]
        # fewer where a limit of the run has cut the update
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress
        steps = progress.current.processed // self.trainer.accumulate_grad_batches
        steps -= min(self.empty_steps.values(), default=0)
        metrics = _prefixed("rollout/", datamodule.metrics)
        prepared = self.preparation.compute()
        if self.max_mismatch is not None and self._mismatch_is_rounding:
            check_mismatch(prepared, limit=self.max_mismatch)
        metrics |= _prefixed("rollout/", prepared)
        metrics |= _prefixed("update/", self.statistics.metrics(steps=steps))
        metrics |= _prefixed("update/", self.step_metrics())
        if self.importance is not None:
            metrics |= _prefixed("importance/", self.importance.compute())
        # the scheduler has already stepped to the next iteration
        schedule: Any = self.trainer.lr_scheduler_configs[0].scheduler
        factor = schedule.lr_lambdas[0](self.trainer.current_epoch)
        metrics["update/learning_rate"] = schedule.base_lrs[0] * factor
        metrics["step"] = float(self.trainer.current_epoch + 1)
        self.log_dict(metrics, rank_zero_only=False)

    def on_validation_epoch_start(self) -> None:
        """Load the engine's weights once for all chunks."""
        self.rollout_engine()

    def validation_step(
        self, batch: ValidationChunk, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, list[Trajectory]]:
        """Play a chunk of a validation set's episodes and return its `trajectories`."""
        validation_set = batch.validation_set
        if validation_set.name not in self.validation_statistics:
            self.validation_statistics[validation_set.name] = RolloutStatistics().to(self.device)
        assert self._engine is not None
        # also without episodes: the engine may be shared with ranks that have some
        trajectories = validation_set.play(
            self._engine,
            version=self.trainer.global_step,
            episode_specs=batch.episode_specs,
        )
        if trajectories:
            self.validation_statistics[validation_set.name].update(trajectories)
        return {"trajectories": trajectories}

    def on_validation_epoch_end(self) -> None:
        """Log the validation sets' metrics: `val/…` for the first, `val_<name>/…` for the others.

        In a mixture they are `val/<environment>/…`, and `val/…` those of the one that is trained with the
        lowest success.
        """
        metrics: dict[str, float] = {}
        by_environment: dict[str, dict[str, float]] = {}
        for number, (name, statistics) in enumerate(self.validation_statistics.items()):
            prefix = "val" if number == 0 else f"val_{name}"
            if name in self.environments:
                prefix = f"val/{name}"
            values = statistics.compute()
            statistics.reset()
            if values["failed"] == 1.0:
                raise RolloutError(
                    f"every episode of validation set {name!r} failed; the warnings above name the errors"
                )
            metrics |= _prefixed(f"{prefix}/", values)
            if self.environments.get(name):
                by_environment[name] = values
        if by_environment:
            metrics |= _prefixed("val/", worst_of(by_environment))
        self._end_rollout()
        metrics["step"] = float(self.trainer.fit_loop.epoch_progress.current.ready)
        self.log_dict(metrics, rank_zero_only=False)

    # ---- resume

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the sums of an unfinished update, those of every rank, and leave out frozen weights."""
        super().on_save_checkpoint(checkpoint)
        importance = [] if self.importance is None else self.importance.export_state()
        checkpoint["agent"] = {
            "statistics": gather_over_ranks(self.statistics.export_state()),
            "preparation": gather_over_ranks(self.preparation.export_state()),
            "importance": gather_over_ranks(importance),
            "normalizers": [normalizer.state_dict() for normalizer in self.normalizers],
            "adds_scores": self._adds_scores,
            "mismatch_is_rounding": self._mismatch_is_rounding,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the sums if the number of ranks is the same, the normalizers and frozen weights."""
        super().on_load_checkpoint(checkpoint)
        state = checkpoint["agent"]
        if len(state["statistics"]) == len(gather_over_ranks(0)):
            self.statistics.import_state(state["statistics"][rank()])
            self.preparation.import_state(state["preparation"][rank()])
            if self.importance is not None and state["importance"][rank()]:
                self.importance.import_state(state["importance"][rank()])
        # one environment in a checkpoint of an earlier version
        saved = state["normalizers"] if "normalizers" in state else [state["normalizer"]]
        if len(saved) != len(self.normalizers):
            raise RolloutError(
                f"the checkpoint is of a run with {len(saved)} environments, and {len(self.normalizers)} are set; set "
                "those of the run, or start another"
            )
        for normalizer, statistics in zip(self.normalizers, saved, strict=True):
            normalizer.load_state_dict(statistics)
        self._adds_scores = state.get("adds_scores", False)
        self._mismatch_is_rounding = state.get("mismatch_is_rounding", False)


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in metrics.items()}
