"""Distillation that gives way to RL over the iterations of a run."""

from __future__ import annotations

import lightning.pytorch as pl

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count
from ragen_pl.base.run_facts import RunFacts
from ragen_pl.callbacks.access import agent_of
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.modules.losses import KLPlace, UpdateLoss


class BlendTeacher(RolloutCallback):
    """Weigh the penalty on the divergence by λ and the policy's loss by 1 - λ, where λ falls over the iterations.

    In iteration m, counted from 0, `λ = max(0, 1 - m / iterations)`, and the coefficients of the loss are
    `λ kl.coefficient` and `(1 - λ) policy_coefficient` (a blend that falls is the idea of ATOD, 2026, arXiv 2606.27814;
    the line is ours). From the iteration `iterations` on the policy learns from rewards alone, and the reference is
    scored no longer.

    Args:
        iterations: Iterations in which λ falls from 1 to 0.
    """

    needs_trust = ()

    @checked
    def __init__(self, *, iterations: Count) -> None:
        self.iterations = iterations
        self._coefficients: tuple[float, float] | None = None

    def check_run(self, facts: RunFacts) -> None:
        """Check that the loss has both terms.

        Raises:
            ValueError: It has not.
        """
        loss = facts.loss
        if not isinstance(loss, UpdateLoss) or loss.kl is None:
            raise ValueError(
                "callbacks.blend: the loss has no divergence from a teacher; set algorithm.loss.kl, or "
                "callbacks.blend=null"
            )
        if (
            loss.kl.place is KLPlace.REWARD
            or not loss.kl.coefficient
            or not loss.policy_coefficient
        ):
            raise ValueError(
                f"callbacks.blend: algorithm.loss.policy_coefficient={loss.policy_coefficient:g} and "
                f"algorithm.loss.kl has coefficient={loss.kl.coefficient:g} and place={loss.kl.place}; both "
                "coefficients are multiplied, so set them above 0, and place=loss"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the coefficients of the present iteration, in whose update a run may be resumed."""
        self._set(trainer, pl_module)

    def on_rollout_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the coefficients of an iteration before its samples are scored."""
        self._set(trainer, pl_module)

    def _set(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        agent = agent_of(pl_module)
        assert agent is not None and agent.loss.kl is not None
        loss, kl = agent.loss, agent.loss.kl
        if self._coefficients is None:
            self._coefficients = kl.coefficient, loss.policy_coefficient
        of_teacher, of_policy = self._coefficients
        weight = max(0.0, 1.0 - trainer.current_epoch / self.iterations)
        kl.coefficient, loss.policy_coefficient = weight * of_teacher, (1.0 - weight) * of_policy
