"""WarmStartModule: supervised learning from demonstrations or records before RL.

The policy learns to read images, to keep the prompt format and to act about as well as the demonstrator. The
critic learns the demonstrator's returns, those of recorded episodes that the policy does not learn included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ragen_pl.algorithms.value_loss import value_loss
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count
from ragen_pl.data.batch import Minibatch
from ragen_pl.data.settings import WarmStartSettings
from ragen_pl.modules.critic import CriticModule, score_together
from ragen_pl.modules.guard import GuardedModule
from ragen_pl.modules.optimizers import OptimizerFactory
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.settings import OptimizationSettings
from ragen_pl.modules.sharding import data_mesh, is_sharded


class WarmStartModule(GuardedModule):
    """Cross-entropy on responses plus the value error, on the same samples.

    Args:
        policy: Policy that learns the responses.
        critic: Critic that learns the returns; None to train the policy only.
        optimizer: Builds the optimizer from the named parameter groups `policy` and `critic`.
        settings: Number of steps, weight of the value error and learning rates; None for the defaults.
        master_weights: Keep float32 copies of trained weights in bfloat16.
        max_skipped_steps: See `GuardedModule`.
    """

    # also the name in the progress display
    phase: ClassVar[str] = "warm start"
    optimizer_key: ClassVar[str] = "warm_start.optimizer"

    @checked
    def __init__(
        self,
        policy: PolicyModule,
        critic: CriticModule | None,
        *,
        optimizer: OptimizerFactory,
        settings: WarmStartSettings | None = None,
        master_weights: bool = True,
        max_skipped_steps: Count = 3,
    ) -> None:
        super().__init__(max_skipped_steps=max_skipped_steps)
        self.policy, self.critic = policy, critic
        self.optimizer_factory = optimizer
        self.settings = settings or WarmStartSettings()
        self.critic_learning_rate = self.settings.critic_lr
        self.optimization = OptimizationSettings(master_weights=master_weights)
        self._step_sums: dict[str, Tensor | float] = {}

    def configure_model(self) -> None:
        """Shard policy and critic if the Trainer's strategy shards models."""
        if self.device_mesh is None or is_sharded(self.policy):
            return
        mesh = data_mesh(self.device_mesh)
        self.policy.shard(mesh)
        if self.critic is not None:
            self.critic.shard(mesh)

    def on_fit_start(self) -> None:
        """Switch to train mode: models are built and loaded in eval mode, and Lightning keeps the mode."""
        self.train()

    def has_tokens(self, batch: Minibatch) -> Mapping[str, Tensor]:
        """Return whether the step trains the policy, and the critic.

        The value error trains the policy too where the critic reads its states.
        """
        policy, critic = batch.counted[0], self.critic
        if critic is None:
            return {"policy": policy}
        values = batch.counted[1] & (self.settings.value_coefficient > 0)
        shared = critic.shares_trunk and not critic.detach_states
        return {"policy": policy | values if shared else policy, "critic": values}

    def losses(self, batch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the joint loss of a minibatch, scaled by `batch.scale`, and its terms.

        Both are averaged over their tokens of the step. A record's weight multiplies the policy's, and is not in the
        denominator: divided by its sum of weights, a step of low ones alone would move the policy as far as any other.
        """
        samples = batch.samples
        mask = samples.value_mask & batch.non_padding
        scores = score_together(
            self.policy, self.critic, samples, batch.images, microbatches=batch.microbatches
        )
        weighted = scores.logprobs * samples.loss_weight * samples.weight[:, None]
        loss = response_loss = -weighted.sum() / batch.loss_tokens
        terms = {"loss": response_loss.detach()}
        if scores.values is not None:
            error = (
                value_loss(scores.values, samples.returns, mask).losses.sum() / batch.value_tokens
            )
            terms["value_loss"] = error.detach()
            loss = response_loss + self.settings.value_coefficient * error
        return loss * batch.scale, terms

    def training_step(self, batch: Minibatch, batch_idx: int) -> Tensor:
        """Return the loss of a minibatch, and log its terms."""
        loss, terms = self.losses(batch)
        self._log({f"warm_start/{name}": value for name, value in terms.items()}, batch)
        return loss

    def clipped_groups(self, optimizer: Optimizer) -> dict[str, list[Parameter]]:
        """Return all weights: policy and critic are clipped together."""
        return {"all": [weight for group in optimizer.param_groups for weight in group["params"]]}

    def _log(self, metrics: dict[str, Tensor], batch: Minibatch) -> None:
        """Add a minibatch to the metrics of its optimizer step, and log them at the end of the step."""
        for name, value in metrics.items():
            self._step_sums[name] = self._step_sums.get(name, 0.0) + value
        if batch.ends_step:
            self.log_dict(self._step_sums, prog_bar=True, sync_dist=True, reduce_fx="sum")
            self._step_sums = {}

    def schedule_settings(self) -> dict[str, float]:
        """Return the settings of the schedule."""
        settings = self.settings
        return {
            "warm_start.warm_up": settings.warm_up,
            "warm_start.learning_rate_end": settings.learning_rate_end,
            "warm_start.steps": settings.steps,
        }

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer and its schedule: a linear rise, then a cosine fall."""
        optimizer = self.build_optimizer()
        settings = self.settings

        def factor(step: int) -> float:
            rise = min(1.0, (step + 1) / max(1, settings.warm_up))
            cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / settings.steps)))
            return rise * (settings.learning_rate_end + (1.0 - settings.learning_rate_end) * cosine)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
