"""Metrics of a run's last weights, computed while they are still on their device."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from ragen_pl.base.files import atomic_write
from ragen_pl.base.foreign_files import json_object
from ragen_pl.base.json_text import json_text
from ragen_pl.checkpoints.folder import Run
from ragen_pl.data.validation import ValidationSet
from ragen_pl.engines.protocol import collective_rollout
from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.modules.agent import AgentModule
from ragen_pl.ranks import ranks
from ragen_pl.run.baselines import blank_image_metrics


class LastWeights(RolloutCallback):
    """Keep and write the last metrics, then play with blank images, before a Trainer moves the model to the host.

    It acts at the end of training, and after the validation of a run that had finished before.

    Args:
        run: Where the metrics are written.
        blank_set: Builds the validation set with blank images; None not to play it.

    Attributes:
        metrics: The Trainer's metrics, those of the last validation among them; empty before.
        blank: Metrics of the policy with blank images, under its name in the summary.
    """

    def __init__(self, run: Run, *, blank_set: Callable[[], ValidationSet] | None) -> None:
        self.run, self.blank_set = run, blank_set
        self.metrics: dict[str, float] = {}
        self.blank: dict[str, dict[str, float]] = {}

    def on_last_weights(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure them at the end of training."""
        self._measure(trainer, cast(AgentModule, pl_module))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure them if this validation is all that the Trainer does."""
        if trainer.state.fn == TrainerFn.VALIDATING:
            self._measure(trainer, cast(AgentModule, pl_module))

    def _measure(self, trainer: pl.Trainer, agent: AgentModule) -> None:
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if trainer.is_global_zero:
            write_metrics(self.metrics, self.run)
        if self.blank_set is None:
            return
        # the first rank plays alone, with weights of all ranks
        ranks.suspend_limits()
        engine = agent.rollout_engine()
        with collective_rollout(engine):
            if trainer.is_global_zero:
                self.blank = blank_image_metrics(self.blank_set(), agent, engine)


def write_metrics(metrics: dict[str, float], run: Run) -> None:
    """Write the last metrics into the run's folder."""
    file = run.folder / "metrics.json"
    # a run that had finished before has no new metrics of an update
    earlier = json_object(file) if run.checkpoint else None
    with atomic_write(file) as partial:
        partial.write_text(json_text((earlier or {}) | metrics, indent=1, sort_keys=True))
