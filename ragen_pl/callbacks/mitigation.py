"""What a collapse monitor can change in a run that is under way, so that a resumed run changes it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl


@dataclass(frozen=True, kw_only=True)
class Mitigation:
    """Settings to switch to; None leaves one as it is.

    Attributes:
        clip_high: the upper clip bound (clip-higher, DAPO: 0.28).
        kl_coefficient: of the penalty on leaving the reference; 0 is off.
        entropy_target: nats a token; the entropy bonus rises while entropy is below it and falls above.
        entropy_rate: by how much the bonus' coefficient moves an iteration for each nat missing.
        entropy_most: highest coefficient.
        learning_rate_share: of the learning rate that is left, now and over the rest of its schedule.
        group_filter: chooses the groups that are trained on, the DataModule's `group_filter`.
    """

    clip_high: float | None = 0.28
    kl_coefficient: float | None = None
    entropy_target: float | None = None
    entropy_rate: float = 0.01
    entropy_most: float = 0.05
    learning_rate_share: float | None = None
    group_filter: Any = None

    def check(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Refuse what this run has no place for.

        Raises:
            ValueError: the module has no loss settings or no reference policy, the DataModule no filter, or nothing
                would be switched, or the clip bound to one that is lower or of another size.
        """
        if not hasattr(pl_module, "adjust_loss"):
            raise ValueError(
                f"a mitigation needs a module with adjust_loss, found {type(pl_module).__name__}; "
                "use AgentModule, or leave `mitigate` out of the actions"
            )
        switches = (
            "clip_high", "kl_coefficient", "entropy_target", "learning_rate_share", "group_filter",
        )  # fmt: skip
        if all(getattr(self, name) is None for name in switches):
            raise ValueError(f"mitigation: all of {', '.join(switches)} are null; set one of them")
        bound = pl_module.loss.policy.clip_high
        if self.clip_high is not None and not bound <= self.clip_high <= 10 * bound:
            raise ValueError(
                f"mitigation.clip_high={self.clip_high:g}: the loss's own is {bound:g}, and clip-higher is somewhat "
                "above it; set a bound of that size, or null"
            )
        if self.kl_coefficient and pl_module.loss.kl is None:
            raise ValueError(
                f"mitigation.kl_coefficient={self.kl_coefficient:g}: this run keeps no reference policy; "
                "set algorithm.loss.kl.coefficient=0.0 rather than algorithm.loss.kl=null"
            )
        datamodule = getattr(trainer, "datamodule", None)
        if self.group_filter is not None and not hasattr(datamodule, "group_filter"):
            raise ValueError(
                f"mitigation.group_filter: {type(datamodule).__name__} has no group_filter; set null"
            )

    def switch_on(self, trainer: pl.Trainer, pl_module: Any) -> dict[str, str]:
        """Switch and return what has changed, as `before -> after` by setting."""
        changed = pl_module.adjust_loss(
            clip_high=self.clip_high, kl_coefficient=self.kl_coefficient
        )
        if self.group_filter is not None:
            datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
            changed["group_filter"] = (datamodule.group_filter, self.group_filter)
            datamodule.group_filter = self.group_filter
        told = {name: f"{before} -> {after}" for name, (before, after) in changed.items()}
        return told | (
            {} if self.entropy_target is None else {"entropy": f"towards {self.entropy_target}"}
        )

    def slow_down(self, trainer: pl.Trainer) -> dict[str, str]:
        """Scale the learning rates. Checkpoints hold them, so that this is not done again on resuming."""
        if self.learning_rate_share is None:
            return {}
        for settings in trainer.lr_scheduler_configs:
            bases: Any = settings.scheduler
            bases.base_lrs = [rate * self.learning_rate_share for rate in bases.base_lrs]
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= self.learning_rate_share
        return {"learning_rate": f"times {self.learning_rate_share:g}"}

    def steer(self, pl_module: Any, *, entropy: float, coefficient: float) -> float:
        """Set the entropy bonus for the next iteration and return its coefficient."""
        if self.entropy_target is None:
            return coefficient
        moved = coefficient + self.entropy_rate * (self.entropy_target - entropy)
        moved = min(max(moved, 0.0), self.entropy_most)
        pl_module.adjust_loss(entropy_coefficient=moved)
        return moved
