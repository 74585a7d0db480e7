"""AgentModule: policy and critic composed for multi-turn RL.

It rolls out with the policy, assigns credit before an update, takes the update's steps and keeps the
metrics. Formulas are in `ragen_pl.algorithms`; which of them apply is the config's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import move_data_to_device
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from ragen_pl.algorithms.credit import Estimator
from ragen_pl.algorithms.normalization import RewardNormalizer
from ragen_pl.data.batch import Minibatch, TrajectoryBatch
from ragen_pl.data.validation import ValidationChunk
from ragen_pl.distributed import gather_over_ranks, rank
from ragen_pl.metrics.importance import ImportanceStatistics
from ragen_pl.metrics.rollout import RolloutStatistics
from ragen_pl.metrics.update import PreparationStatistics, UpdateStatistics
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.losses import LossSettings, Masks
from ragen_pl.modules.objective import objective
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.preparation import Scorer, prepare_batch
from ragen_pl.rollout.engine import EngineFactory, RolloutEngine

OptimizerFactory = Callable[[Iterable[dict[str, object]]], torch.optim.Optimizer]


class AgentModule(pl.LightningModule):
    """Train a policy, and a critic where the estimator needs one, on its own trajectories.

    Args:
        policy: what acts.
        critic: what values states; None for estimators without.
        estimator: advantages and returns from rewards and values.
        masks: M_loss and M_adv.
        loss: what the update minimises.
        normalizer: of the episodes' returns; None to leave them.
        optimizer: makes one optimizer from the named parameter groups `policy` and `critic`.
        engine: Rollout engine of the policy.
        learning_rate_end: the rate's share at the last iteration, reached linearly by iteration.
        critic_rate: the critic's learning rate as a multiple of the policy's.
        tokens_per_forward: padded tokens scored at once before an update.
    """

    def __init__(
        self,
        policy: PolicyModule,
        critic: CriticModule | None,
        *,
        estimator: Estimator,
        masks: Masks,
        loss: LossSettings,
        optimizer: OptimizerFactory,
        engine: EngineFactory,
        normalizer: RewardNormalizer | None = None,
        learning_rate_end: float = 0.1,
        critic_rate: float = 1.0,
        tokens_per_forward: int = 16_384,
    ) -> None:
        super().__init__()
        if estimator.needs_values and critic is None:
            raise ValueError(f"{type(estimator).__name__} needs a critic; set algorithm.critic")
        self.policy, self.critic = policy, critic if estimator.needs_values else None
        self.reference = None if loss.kl is None else loss.kl.reference.build(policy)
        self.normalizer = normalizer or RewardNormalizer()
        self.estimator, self.masks, self.loss = estimator, masks, loss
        self.optimizer_factory = optimizer
        self.learning_rate_end, self.critic_rate = learning_rate_end, critic_rate
        self.tokens_per_forward = tokens_per_forward
        self.statistics = UpdateStatistics()
        self.preparation = PreparationStatistics()
        self.importance = None if masks.importance is None else ImportanceStatistics()
        self.validation_statistics: dict[str, RolloutStatistics] = {}
        self.gradient_norms: dict[str, float] = {}
        self.engine_factory = engine
        self._engine: RolloutEngine | None = None

    def train(self, mode: bool = True) -> AgentModule:
        """Set the mode of policy and critic; the reference never trains."""
        super().train(mode)
        if isinstance(self.reference, torch.nn.Module):
            self.reference.eval()
        return self

    # ---- rollout phase

    def rollout_engine(self) -> RolloutEngine:
        """Return the rollout engine, which is built on the first call."""
        if self._engine is None:
            self._engine = self.engine_factory(self.policy, forward_context=self._forward_context)
        return self._engine

    def teardown(self, stage: str) -> None:
        """Close the rollout engine; a later rollout builds it again."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _forward_context(self) -> Any:
        return self.trainer.precision_plugin.forward_context()

    def prepare(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """Fill a batch's masks, values, reference log-probs, advantages and returns."""
        self.statistics.reset()
        self.gradient_norms = {}
        if self.importance is not None:
            self.importance.reset()
        batch = move_data_to_device(batch, self.device)
        if self.reference is not None and self.loss.kl is not None:
            self.loss.kl.reference.follow(self.reference, self.policy)
        with self._forward_context():
            self.preparation = prepare_batch(
                batch,
                self.scorer,
                estimator=self.estimator,
                masks=self.masks,
                tokens_per_forward=self.tokens_per_forward,
                normalizer=self.normalizer,
                report=self.importance,
            )
        return move_data_to_device(batch, torch.device("cpu"))

    # ---- update phase

    @property
    def scorer(self) -> Scorer:
        """Policy, critic and reference, asked together."""
        return Scorer(self.policy, self.critic, self.reference, self.loss)

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        """Return the loss of a minibatch, scaled so that what the ranks average is the global loss."""
        result = objective(self.scorer.score_minibatch(batch), batch, self.loss)
        self.statistics.update(result.sums)
        return result.loss * batch.scale

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return one optimizer with the named groups `policy` and `critic`, its rate falling by iteration."""
        policy = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        optimizer = self.optimizer_factory([{"params": policy, "name": "policy"}])
        rates = [1.0]
        if self.critic is not None:
            critic = [
                parameter for parameter in self.critic.parameters() if parameter.requires_grad
            ]
            rate = optimizer.param_groups[0]["lr"] * self.critic_rate
            optimizer.add_param_group(
                {"params": critic, "name": "critic", "lr": rate, "initial_lr": rate}
            )
            rates.append(self.critic_rate)
        most = self.trainer.max_epochs
        iterations = max(1, most or 1)
        end = (
            1.0 if most == -1 else self.learning_rate_end
        )  # without an end there is none to fall to

        def share(iteration: int) -> float:
            return 1.0 - (1.0 - end) * min(1.0, iteration / iterations)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [share] * len(rates))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "epoch", "name": "rate"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each parameter group by its own norm, and remember the norms."""
        for group in optimizer.param_groups:
            limit = float("inf") if gradient_clip_val is None else gradient_clip_val
            norm = torch.nn.utils.clip_grad_norm_(group["params"], limit)
            self.gradient_norms[group["name"]] = max(
                self.gradient_norms.get(group["name"], 0.0), float(norm)
            )

    def adjust_loss(
        self,
        *,
        clip_high: float | None = None,
        kl_coefficient: float | None = None,
        entropy_coefficient: float | None = None,
    ) -> dict[str, tuple[object, object]]:
        """Change settings of the loss while training, from the next step on; None leaves one as it is.

        Checkpoints do not hold these settings: who changes them, changes them again on resuming.

        Returns:
            (before, after) by the name of what has changed.

        Raises:
            ValueError: a KL penalty is asked for in a run that keeps no reference.
        """
        if kl_coefficient and self.loss.kl is None:
            raise ValueError(
                f"kl_coefficient={kl_coefficient:g}: this run keeps no reference policy; "
                "set algorithm.loss.kl.coefficient=0.0 rather than algorithm.loss.kl=null"
            )
        places: list[tuple[str, object, str, float | None]] = [
            ("clip_high", self.loss.policy, "clip_high", clip_high),
            ("kl_coefficient", self.loss.kl, "coefficient", kl_coefficient),
            ("entropy_coefficient", self.loss, "entropy_coefficient", entropy_coefficient),
        ]
        changed: dict[str, tuple[object, object]] = {}
        for name, holder, attribute, value in places:
            if holder is not None and value is not None and getattr(holder, attribute) != value:
                changed[name] = (getattr(holder, attribute), value)
                setattr(holder, attribute, value)
        return changed

    # ---- metrics

    def on_train_epoch_end(self) -> None:
        """Log the iteration's metrics."""
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        steps = datamodule.epochs * datamodule.minibatches
        figures = {f"rollout/{name}": value for name, value in datamodule.metrics.items()}
        figures |= {f"rollout/{name}": value for name, value in self.preparation.compute().items()}
        figures |= {
            f"update/{name}": value for name, value in self.statistics.metrics(steps=steps).items()
        }
        figures |= {
            f"update/gradient_norm_{name}": value for name, value in self.gradient_norms.items()
        }
        if self.importance is not None:
            selected = self.importance.compute().items()
            figures |= {f"importance/{name}": value for name, value in selected}
        schedule: Any = self.trainer.lr_scheduler_configs[
            0
        ].scheduler  # it has gone on to the next iteration
        rate = schedule.lr_lambdas[0](self.trainer.current_epoch)
        figures["update/learning_rate"] = schedule.base_lrs[0] * rate
        self._log(figures, self.trainer.current_epoch + 1)

    def validation_step(
        self, batch: ValidationChunk, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Play some of a validation set's episodes."""
        validation_set = batch.validation_set
        if validation_set.name not in self.validation_statistics:
            self.validation_statistics[validation_set.name] = RolloutStatistics().to(self.device)
        if batch.starts:
            engine = self.rollout_engine()
            engine.load_weights(self.trainer.global_step)
            trajectories = validation_set.proxy.rollout(
                engine, batch.starts, seed_key=("panel",), greedy=validation_set.greedy
            )
            self.validation_statistics[validation_set.name].update(trajectories)

    def on_validation_epoch_end(self) -> None:
        """Log the validation sets' metrics: `val/…` for the first, `val_<name>/…` for the others."""
        figures: dict[str, float] = {}
        for number, (name, statistics) in enumerate(self.validation_statistics.items()):
            prefix = "val" if number == 0 else f"val_{name}"
            figures |= {f"{prefix}/{key}": value for key, value in statistics.compute().items()}
            statistics.reset()
        ready = self.trainer.fit_loop.epoch_progress.current.ready
        self._log(figures, ready)

    def _log(self, figures: dict[str, float], iteration: int) -> None:
        kept = {
            name: value for name, value in figures.items() if value == value
        }  # no NaN into the store
        self.log_dict(kept | {"step": float(iteration)}, rank_zero_only=False)

    # ---- resume

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the sums of an unfinished update, every rank's own."""
        checkpoint["agent"] = {
            "statistics": gather_over_ranks(self.statistics.export_state()),
            "preparation": gather_over_ranks(self.preparation.export_state()),
            "importance": gather_over_ranks(
                self.importance.export_state() if self.importance is not None else []
            ),
            "gradient_norms": dict(self.gradient_norms),
            "normalizer": self.normalizer.state_dict(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore them, where the environment size is the same."""
        state = checkpoint["agent"]
        if len(state["statistics"]) == len(gather_over_ranks(0)):
            self.statistics.import_state(state["statistics"][rank()])
            self.preparation.import_state(state["preparation"][rank()])
            selected = state.get("importance") and state["importance"][rank()]
            if self.importance is not None and selected:
                self.importance.import_state(selected)
        self.gradient_norms = dict(state["gradient_norms"])
        self.normalizer.load_state_dict(state["normalizer"])
