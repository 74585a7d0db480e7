"""Optimizer steps without a trained token, which are not taken.

Their gradients are 0, and an optimizer with momentum or weight decay would move the weights nevertheless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from ragen_pl.data.batch import Minibatch, TrajectoryBatch
from ragen_pl.modules.optimizers import module_name


class LeavesEmptySteps(pl.LightningModule):
    """A training module that trains a group of weights only in steps with a token for it, counted over all ranks.

    The optimizer is called without the gradients of the other groups, so neither their weights nor their moments
    change. A schedule by steps does not count a step without any group.

    Attributes:
        empty_steps: Number of steps without a token, by group, of the update phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self.empty_steps: dict[str, int] = {}
        self._has_tokens: Mapping[str, Tensor] = {}
        self._is_empty = False

    def has_tokens(self, batch: Minibatch) -> Mapping[str, Tensor]:
        """Return whether a minibatch's optimizer step trains a group of the optimizer, bool `[]`, by its name."""
        raise NotImplementedError

    def on_train_batch_start(self, batch: Minibatch | TrajectoryBatch, batch_idx: int) -> None:
        """Keep which groups the minibatch's step trains. `training_step` does for a batch that it makes one of."""
        if isinstance(batch, Minibatch):
            self.note_tokens(batch)

    def note_tokens(self, batch: Minibatch) -> None:
        """Keep which groups the step trains; a whole batch as a minibatch knows nothing of the step's earlier ones."""
        earlier, found = self._has_tokens, self.has_tokens(batch)
        self._has_tokens = {name: has | earlier.get(name, has) for name, has in found.items()}

    def leave_empty_groups(self, optimizer: Optimizer) -> None:
        """Drop the gradients of the groups that the step does not train, and count it."""
        found, self._has_tokens = self._has_tokens, {}
        # one wait for the device
        flags = torch.stack([*found.values()]).tolist() if found else []
        trained = dict(zip(found, flags, strict=True))
        for group in optimizer.param_groups:
            # the groups of a module that is trained alone have no names
            name = module_name(group) or next(iter(trained), "")
            if not trained.get(name, True):
                for weight in group["params"]:
                    weight.grad = None
        for name, is_trained in trained.items():
            self.empty_steps[name] = self.empty_steps.get(name, 0) + (not is_trained)
        self._is_empty = bool(trained) and not any(flags)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of the groups that the step trains."""
        self.leave_empty_groups(optimizer)
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a schedule, unless it goes by steps and this one is not taken."""
        configs = self.trainer.lr_scheduler_configs
        by_step = any(each.scheduler is scheduler and each.interval == "step" for each in configs)
        if not (by_step and self._is_empty):
            super().lr_scheduler_step(scheduler, metric)
