"""Settings that a collapse monitor can change during a run; a resumed run changes them again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from ragen_pl.algorithms.group_filter import GroupFilter
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import NonNegative, Positive, PositiveFraction
from ragen_pl.callbacks.access import agent_of, datamodule_of, rollouts_of
from ragen_pl.modules.agent import AgentModule
from ragen_pl.modules.losses import UpdateLoss

_SWITCHES = (
    "clip_high",
    "kl_coefficient",
    "entropy_target",
    "learning_rate_factor",
    "group_filter",
)


@checked
@dataclass(frozen=True, kw_only=True)
class Mitigation:
    """Settings to switch to; None leaves a setting as it is.

    Attributes:
        clip_high: Upper clip bound (clip-higher, DAPO: 0.28).
        kl_coefficient: Coefficient of the penalty on leaving the reference; 0 is off.
        entropy_target: Nats a token; the entropy bonus rises while entropy is below it and falls above.
        entropy_rate: Change of the bonus' coefficient an iteration for each nat of difference.
        max_entropy_coefficient: Highest coefficient of the bonus.
        learning_rate_factor: Factor on the learning rate, now and over the rest of its schedule.
        group_filter: Filter of the groups that are trained on, the DataModule's `group_filter`.
    """

    needs_trust = ()

    clip_high: Positive | None = 0.28
    kl_coefficient: NonNegative | None = None
    entropy_target: NonNegative | None = None
    entropy_rate: NonNegative = 0.01
    max_entropy_coefficient: NonNegative = 0.05
    learning_rate_factor: PositiveFraction | None = None
    group_filter: GroupFilter | None = None

    def check_loss(self, loss: UpdateLoss) -> None:
        """Check that a run with this loss can switch to these settings.

        Raises:
            ValueError: Nothing would be switched, the run has no reference policy, or the clip bound is lower than the
                run's or of another size.
        """
        if all(getattr(self, name) is None for name in _SWITCHES):
            raise ValueError(
                f"callbacks.collapse.mitigation: all of {', '.join(_SWITCHES)} are null; set one of them"
            )
        bound = loss.policy.clip_high
        if self.clip_high is not None and not bound <= self.clip_high <= 10 * bound:
            raise ValueError(
                f"callbacks.collapse.mitigation.clip_high={self.clip_high:g}: the loss's own bound is {bound:g}, "
                "expected a value somewhat above it; set a bound of that size, or null"
            )
        loss.require_reference("callbacks.collapse.mitigation.kl_coefficient", self.kl_coefficient)

    def check(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that the run can switch to these settings.

        Raises:
            ValueError: The module has no loss settings, `check_loss` refuses them, or the DataModule has no filter.
        """
        agent = agent_of(pl_module)
        if agent is None:
            raise ValueError(
                f"a mitigation changes the loss of an AgentModule, found {type(pl_module).__name__}; "
                "use AgentModule, or leave `mitigate` out of the actions"
            )
        self.check_loss(agent.loss)
        if self.group_filter is not None and rollouts_of(trainer) is None:
            name = type(datamodule_of(trainer)).__name__
            raise ValueError(
                f"callbacks.collapse.mitigation.group_filter: {name} has no group_filter; set null"
            )

    def switch_on(self, trainer: pl.Trainer, agent: AgentModule) -> dict[str, str]:
        """Switch the settings and return the changes as `before -> after` by setting."""
        changes = agent.loss.adjust(clip_high=self.clip_high, kl_coefficient=self.kl_coefficient)
        datamodule = rollouts_of(trainer)
        if self.group_filter is not None and datamodule is not None:
            changes["group_filter"] = (datamodule.group_filter, self.group_filter)
            datamodule.group_filter = self.group_filter
        texts = {name: f"{before} -> {after}" for name, (before, after) in changes.items()}
        if self.entropy_target is not None:
            texts["entropy"] = f"towards {self.entropy_target}"
        return texts

    def slow_down(self, trainer: pl.Trainer) -> dict[str, str]:
        """Scale the learning rates. Checkpoints hold them, so a resumed run does not repeat this."""
        if self.learning_rate_factor is None:
            return {}
        for settings in trainer.lr_scheduler_configs:
            scheduler: Any = settings.scheduler
            scheduler.base_lrs = [rate * self.learning_rate_factor for rate in scheduler.base_lrs]
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= self.learning_rate_factor
        return {"learning_rate": f"times {self.learning_rate_factor:g}"}

    def steer_entropy(self, agent: AgentModule, *, entropy: float, coefficient: float) -> float:
        """Set the entropy bonus for the next iteration and return its coefficient."""
        if self.entropy_target is None or not math.isfinite(entropy):
            return coefficient
        moved = coefficient + self.entropy_rate * (self.entropy_target - entropy)
        moved = min(max(moved, 0.0), self.max_entropy_coefficient)
        agent.loss.adjust(entropy_coefficient=moved)
        return moved
