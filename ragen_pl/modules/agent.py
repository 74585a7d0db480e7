"""AgentModule: policy and critic composed for multi-turn RL.

It rolls out with the policy, assigns credit before an update, takes the update's steps and keeps the
figures. Formulas are in `ragen_pl.algorithms`; which of them apply is the config's choice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import move_data_to_device
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from ragen_pl.algorithms.aggregation import Aggregation, aggregate
from ragen_pl.algorithms.estimators import Estimator
from ragen_pl.algorithms.kl import KLEstimator, kl_estimate
from ragen_pl.algorithms.policy_loss import clipped_surrogate
from ragen_pl.algorithms.value_loss import value_loss
from ragen_pl.data.batch import Minibatch, Samples, TrajectoryBatch
from ragen_pl.data.panel import PanelChunk
from ragen_pl.distributed import gather_over_ranks, rank
from ragen_pl.metrics.rollout import RolloutStatistics
from ragen_pl.metrics.update import PreparationStatistics, UpdateStatistics
from ragen_pl.modules.credit import apply_masks, assign_credit
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.forward import decoder_parts
from ragen_pl.modules.losses import FULL_KL, LossSettings, Masks
from ragen_pl.modules.policy import PolicyModule, TokenScores
from ragen_pl.rollout.transformers_engine import TransformersEngine

OptimizerFactory = Callable[[Iterable[dict[str, object]]], torch.optim.Optimizer]


class AgentModule(pl.LightningModule):
    """Train a policy, and a critic where the estimator needs one, on its own trajectories.

    Args:
        policy: what acts.
        critic: what values states; None for estimators without.
        estimator: advantages and returns from rewards and values.
        masks: M_loss and M_adv.
        loss: what the update minimises.
        optimizer: makes one optimizer from the named parameter groups `policy` and `critic`.
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
        learning_rate_end: float = 0.1,
        critic_rate: float = 1.0,
        tokens_per_forward: int = 16_384,
    ) -> None:
        super().__init__()
        if estimator.needs_values and critic is None:
            raise ValueError(f"{type(estimator).__name__} needs a critic; set algorithm.critic")
        self.policy, self.critic = policy, critic if estimator.needs_values else None
        self.reference = (
            _frozen_copy(policy) if loss.kl is not None and loss.kl.coefficient > 0 else None
        )
        self.estimator, self.masks, self.loss = estimator, masks, loss
        self.optimizer_factory = optimizer
        self.learning_rate_end, self.critic_rate = learning_rate_end, critic_rate
        self.tokens_per_forward = tokens_per_forward
        self.statistics = UpdateStatistics()
        self.preparation = PreparationStatistics()
        self.panel_statistics: dict[str, RolloutStatistics] = {}
        self.gradient_norms: dict[str, float] = {}
        self._engine: TransformersEngine | None = None

    def train(self, mode: bool = True) -> AgentModule:
        """Set the mode of policy and critic; the reference never trains."""
        super().train(mode)
        if self.reference is not None:
            self.reference.eval()
        return self

    # ---- rollout phase

    def rollout_engine(self) -> TransformersEngine:
        """Return the in-process engine on the policy's present weights."""
        if self._engine is None:
            self._engine = TransformersEngine(
                self.policy.bundle, forward_context=self._forward_context
            )
        return self._engine

    def _forward_context(self) -> Any:
        return self.trainer.precision_plugin.forward_context()

    @torch.no_grad()
    def prepare(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """Fill a batch's masks, values, reference log-probs, advantages and returns."""
        self.statistics.reset()
        self.gradient_norms = {}
        batch = move_data_to_device(batch, self.device)
        apply_masks(batch, self.masks, kl=None if self.loss.kl is None else self.loss.kl.mask)
        samples = batch.samples
        parts = decoder_parts(samples.length, self.tokens_per_forward)
        with self._forward_context():
            scores = self._score(samples, batch.pictures, parts=parts)
            if scores.values is not None:
                samples.values = scores.values
                self._bootstrap(batch)
            if self.reference is not None:
                batch.reference = self._reference_logprobs(samples, batch.pictures, parts)
        assign_credit(batch, self.estimator, whiten_advantages=self.loss.whiten)
        self._count_preparation(samples, scores)
        return move_data_to_device(batch, torch.device("cpu"))

    def _score(
        self, samples: Samples, pictures: Tensor, *, parts: list[Tensor] | None = None
    ) -> TokenScores:
        shared = self.critic if self.critic is not None and self.critic.shares_trunk else None
        scores = self.policy.score(samples, pictures, critic=shared, parts=parts)
        if self.critic is not None and shared is None:
            scores.values = self.critic.values(samples, pictures, parts=parts)
        return scores

    def _bootstrap(self, batch: TrajectoryBatch) -> None:
        """Value the state after the last turn of episodes that were cut from outside."""
        if batch.final is None or self.critic is None:
            return
        values = self.critic.last_values(batch.final, batch.pictures, trunk=self.policy.bundle)
        batch.episodes.bootstrap[batch.final.episode] = values.float()

    def _reference_logprobs(
        self, samples: Samples, pictures: Tensor, parts: list[Tensor]
    ) -> Tensor:
        assert self.reference is not None and self.loss.kl is not None
        if self.loss.kl.estimator == FULL_KL:
            return self.reference.reference_logprobs(samples, pictures, parts)
        scores = self.reference.score(samples, pictures, parts=parts)
        sampled = samples.turn >= 0
        result = scores.logprobs.new_zeros(int(sampled.sum()))
        result[samples.token[sampled]] = scores.logprobs[sampled]
        return result

    def _count_preparation(self, samples: Samples, scores: TokenScores) -> None:
        self.preparation.reset()
        sampled, credited = samples.turn >= 0, samples.advantage_mask
        delta = (scores.logprobs - samples.behaviour_logprobs)[sampled]
        returns, errors = (
            samples.returns[credited].double(),
            (samples.returns - samples.values)[credited].double(),
        )
        self.preparation.update(
            {
                "tokens": int(sampled.sum()),
                "mismatch": delta.abs().double().sum(),
                "mismatch_max": delta.abs().max(),
                "mismatch_kl": (delta.exp() - 1 - delta).double().sum(),
                "credited": len(returns),
                "returns": returns.sum(),
                "returns_square": returns.square().sum(),
                "errors": errors.sum(),
                "errors_square": errors.square().sum(),
            }
        )

    # ---- update phase

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        """Return the loss of a minibatch, its sums divided by the optimizer step's global counts."""
        samples, settings = batch.samples, self.loss
        shared = self.critic if self.critic is not None and self.critic.shares_trunk else None
        full = settings.kl is not None and settings.kl.estimator == FULL_KL
        scores = self.policy.score(
            samples, batch.pictures, critic=shared, reference=batch.reference if full else None
        )
        if self.critic is not None and shared is None:
            scores.values = self.critic.values(samples, batch.pictures)
        real = (samples.weight > 0)[:, None]
        mask = samples.loss_mask & real
        surrogate = clipped_surrogate(
            scores.logprobs, samples.behaviour_logprobs, samples.advantages, mask,
            clip_low=settings.policy.clip_low, clip_high=settings.policy.clip_high, dual_clip=settings.policy.dual_clip,
        )  # fmt: skip
        policy = self._reduce(
            surrogate.losses, mask, batch, settings.policy.aggregation, settings.policy.constant
        )
        entropy = self._reduce(
            scores.entropy, mask, batch, settings.policy.aggregation, settings.policy.constant
        )
        value = self._value_loss(scores, samples, batch, real)
        kl, kl_sum, kl_tokens = self._kl(scores, samples, batch, real)
        loss = (
            policy
            + settings.value_coefficient * value
            + kl
            - settings.entropy_coefficient * entropy
        )
        self.statistics.update(
            {
                "tokens": surrogate.tokens,
                "entropy": (scores.entropy.detach() * mask).sum(),
                "approx_kl": surrogate.approx_kl,
                "clipped_low": surrogate.clipped_low,
                "clipped_high": surrogate.clipped_high,
                "dual_clipped": surrogate.dual_clipped,
                "loss": loss.detach(),
                "policy_loss": policy.detach(),
                "value_loss": value.detach(),
                "kl_loss": kl.detach(),
                "entropy_bonus": entropy.detach(),
                "kl": kl_sum,
                "kl_tokens": kl_tokens,
            }
        )
        return loss * batch.scale

    def _reduce(
        self,
        losses: Tensor,
        mask: Tensor,
        batch: Minibatch,
        how: Aggregation,
        constant: float | None = None,
    ) -> Tensor:
        total = (
            batch.tokens if how is Aggregation.TOKEN_MEAN else batch.sequences * (constant or 1.0)
        )
        return aggregate(losses, mask, how=how, denominator=total)

    def _value_loss(
        self, scores: TokenScores, samples: Samples, batch: Minibatch, real: Tensor
    ) -> Tensor:
        if scores.values is None:
            return scores.logprobs.new_zeros(())
        mask = samples.advantage_mask & real
        losses = value_loss(
            scores.values,
            samples.returns,
            mask,
            old_values=samples.values,
            clip=self.loss.value_clip,
        ).losses
        return self._reduce(losses, mask, batch, Aggregation.TOKEN_MEAN)

    def _kl(
        self, scores: TokenScores, samples: Samples, batch: Minibatch, real: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted penalty, and the plain divergence's sum and tokens for the figures."""
        settings, zero = self.loss.kl, scores.logprobs.new_zeros(())
        if settings is None or batch.reference is None:
            return zero, zero, zero
        divergence = scores.kl
        if divergence is None:
            reference = torch.zeros_like(scores.logprobs)
            reference[samples.turn >= 0] = batch.reference
            divergence = kl_estimate(
                scores.logprobs, reference, how=KLEstimator(settings.estimator)
            )
        mask = samples.kl_mask & real
        penalty = settings.coefficient * self._reduce(divergence, mask, batch, settings.aggregation)
        return penalty, (divergence.detach() * mask).sum(), mask.sum()

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
        iterations = max(1, int(self.trainer.max_epochs or 1))
        end = self.learning_rate_end

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

    # ---- figures

    def on_train_epoch_end(self) -> None:
        """Log the iteration's figures."""
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        steps = datamodule.epochs * datamodule.minibatches
        figures = {f"rollout/{name}": value for name, value in datamodule.metrics.items()}
        figures |= {f"rollout/{name}": value for name, value in self.preparation.compute().items()}
        figures |= {
            f"update/{name}": value for name, value in self.statistics.figures(steps=steps).items()
        }
        figures |= {
            f"update/gradient_norm_{name}": value for name, value in self.gradient_norms.items()
        }
        figures["update/learning_rate"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        self._log(figures, self.trainer.current_epoch + 1)

    def validation_step(self, batch: PanelChunk, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Play some of a panel's episodes."""
        panel = batch.panel
        if panel.name not in self.panel_statistics:
            self.panel_statistics[panel.name] = RolloutStatistics().to(self.device)
        if batch.starts:
            engine = self.rollout_engine()
            engine.sync_weights(self.trainer.global_step)
            trajectories = panel.proxy.rollout(
                engine, batch.starts, seed_key=("panel",), greedy=panel.greedy
            )
            self.panel_statistics[panel.name].update(trajectories)

    def on_validation_epoch_end(self) -> None:
        """Log the panels' figures: `val/…` for the first, `val_<name>/…` for the others."""
        figures: dict[str, float] = {}
        for number, (name, statistics) in enumerate(self.panel_statistics.items()):
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
            "gradient_norms": dict(self.gradient_norms),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore them, where the world size is the same."""
        state = checkpoint["agent"]
        if len(state["statistics"]) == len(gather_over_ranks(0)):
            self.statistics.import_state(state["statistics"][rank()])
            self.preparation.import_state(state["preparation"][rank()])
        self.gradient_norms = dict(state["gradient_norms"])


def _frozen_copy(policy: PolicyModule) -> PolicyModule:
    """Return a policy with a copy of the weights that nothing trains."""
    bundle = copy.copy(policy.bundle)
    bundle.model = copy.deepcopy(policy.bundle.model)
    frozen = PolicyModule(bundle, length_buckets=policy.length_buckets)
    frozen.requires_grad_(False)
    return frozen.eval()
