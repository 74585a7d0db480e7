"""Optimizer steps that are skipped because a gradient or the loss is not finite.

One such step makes NaN of all weights. A skipped step is a minibatch that is lost. A run whose steps are skipped one
after the other learns nothing: it records the step, looks for where the first such number is, and ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count
from ragen_pl.base.distributed import any_over_ranks, gather_over_ranks, rank, whole, world_size
from ragen_pl.base.finite import NonFiniteError, largest
from ragen_pl.base.seeding import random_state
from ragen_pl.checkpoints.rank_states import save_rank_states
from ragen_pl.data.batch import Minibatch, TrajectoryBatch
from ragen_pl.modules.empty_steps import LeavesEmptySteps
from ragen_pl.modules.optimized import UPDATE, OptimizedModule
from ragen_pl.modules.optimizers import module_name
from ragen_pl.modules.separate_gradients import SeparateGradients

if TYPE_CHECKING:
    from ragen_pl.modules.recording import Finding

FOLDER = "bad_batch"
"""Folder in the run's one for the step that ended it."""

_STATE = "steps"
# name of the norm of the separate term: the penalty on the divergence
_SEPARATE = "kl"
_RECENT, _FRACTION = 1000, 0.01


@dataclass(kw_only=True)
class SkippedSteps:
    """Counts skipped optimizer steps and says when there are too many.

    Attributes:
        limit: Skipped steps in a row that are too many. So is 1% of the last 1,000 steps, if that is more.
        steps: Number of steps, skipped ones included.
        in_a_row: Skipped steps since the last one that was not.
        in_phase: Skipped steps of the present update phase.
        recent: Numbers of the skipped steps among the last 1,000.
    """

    limit: int
    steps: int = 0
    in_a_row: int = 0
    in_phase: int = 0
    recent: list[int] = field(default_factory=list)

    def note(self, *, skipped: bool) -> None:
        """Count a step."""
        self.steps += 1
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        self.in_phase += skipped
        numbers = [*self.recent, self.steps] if skipped else self.recent
        self.recent = [number for number in numbers if number > self.steps - _RECENT]

    def too_many(self) -> str | None:
        """Return in words which steps were skipped if these are too many, else None."""
        if self.in_a_row >= self.limit:
            return f"{self.in_a_row} steps in a row" if self.in_a_row > 1 else "the step"
        if len(self.recent) >= max(self.limit, _FRACTION * _RECENT):
            return f"{len(self.recent)} of the last {_RECENT} steps"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        counts = {name: getattr(self, name) for name in ("steps", "in_a_row", "in_phase")}
        return counts | {"recent": list(self.recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        for name, value in state.items():
            setattr(self, name, value)


class SkippedStepsError(NonFiniteError):
    """Too many optimizer steps were skipped.

    Attributes:
        record: File of the last one, of the rank where its first number is that is not finite; None without a file.
    """

    on_all_ranks = True

    def __init__(self, text: str, *, record: Path | None) -> None:
        super().__init__(text)
        self.record = record


class GuardedModule(LeavesEmptySteps, OptimizedModule):
    """A training module whose optimizer takes no step with a gradient or a loss that is not finite, or without tokens.

    The optimizer is called without gradients then, so neither weights nor moments change. All ranks skip the same
    steps. In float16 the gradient scaler skips steps too, while it lowers a scale that is too large: these are counted,
    and end no run while the scale is above 1.

    Args:
        max_skipped_steps: Skipped steps in a row that end the run. So does 1% of the last 1,000, if that is more.

    Attributes:
        skipped: Counts of skipped steps.
        gradient_norms: Largest norm of each group in the update phase, NaN if one was.
    """

    @checked
    def __init__(self, *, max_skipped_steps: Count = 3) -> None:
        super().__init__()
        self.skipped = SkippedSteps(limit=max_skipped_steps)
        self.gradient_norms: dict[str, float] = {}
        self.separate = SeparateGradients()
        # of the minibatches since the last step
        self._losses_are_finite: Tensor | bool = True
        self._random: dict[int, dict[str, Tensor]] = {}

    def clipped_groups(self, optimizer: Optimizer) -> dict[str, list[Parameter]]:
        """Return the weights whose gradients are clipped together: those of a module, by its name."""
        groups: dict[str, list[Parameter]] = {}
        for group in optimizer.param_groups:
            groups.setdefault(module_name(group), []).extend(group["params"])
        return groups

    @property
    def separate_norm(self) -> float | None:
        """Largest norm of the gradients in `separate`; None where no term is clipped by itself."""
        return None

    def begin_update(self) -> None:
        """Start the norms and counts of an update phase."""
        self.gradient_norms, self.skipped.in_phase, self.empty_steps = {}, 0, {}

    def step_metrics(self) -> dict[str, float]:
        """Return the norms and the numbers of skipped and of empty steps of the update phase."""
        norms = {f"gradient_norm_{name}": norm for name, norm in self.gradient_norms.items()}
        empty = {f"empty_steps_{name}": float(count) for name, count in self.empty_steps.items()}
        return norms | empty | {"skipped_steps": float(self.skipped.in_phase)}

    # ---- Lightning's hooks

    def on_train_batch_start(self, batch: Minibatch | TrajectoryBatch, batch_idx: int) -> None:
        """Keep the random state, with which the minibatch can be repeated."""
        super().on_train_batch_start(batch, batch_idx)
        self._random[batch_idx] = random_state()

    def on_before_backward(self, loss: Tensor) -> None:
        """Note whether the loss is finite, without a wait for the device."""
        self._losses_are_finite = loss.detach().isfinite() & self._losses_are_finite

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients by the norms of their groups or by value, or drop them all if one is not finite.

        Those of a separate term are clipped by their own norm and added. Those of a group that the step does not train
        are dropped.

        Raises:
            SkippedStepsError: Too many steps were skipped.
        """
        groups = self.clipped_groups(optimizer)
        norms = {
            name: torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
            for name, weights in groups.items()
        }
        if self.separate_norm is not None:
            self.separate.average_over_ranks(self)
            norms[_SEPARATE] = self.separate.norm()
        values = {name: float(whole(norm)) for name, norm in norms.items()}
        is_finite = all(map(math.isfinite, values.values())) and bool(self._losses_are_finite)
        skipped = any_over_ranks(not is_finite)
        lowers_scale = skipped and self._lowers_scale()
        if not lowers_scale:
            known = self.gradient_norms
            self.gradient_norms = {
                name: largest(known.get(name, 0.0), value) for name, value in values.items()
            }
        if skipped:
            # optimizers leave weights without a gradient, and their moments, as they are
            optimizer.zero_grad(set_to_none=True)
        elif gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val is not None and gradient_clip_val > 0.0:
            for name, weights in groups.items():
                torch.nn.utils.clip_grads_with_norm_(weights, gradient_clip_val, norms[name])
        if self.separate_norm is not None and not skipped:
            self.separate.add_to(self, max_norm=self.separate_norm, norm=norms[_SEPARATE])
        self.separate.clear()
        # after the separate term, whose gradients of 0 would let an optimizer move the weights
        self.leave_empty_groups(optimizer)
        self.skipped.note(skipped=skipped)
        too_many = self.skipped.too_many() if skipped and not lowers_scale else None
        if too_many is not None:
            self._end_run(too_many)
        self._losses_are_finite, self._random = True, {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the norms and counts, and the state of an unfinished step."""
        super().on_save_checkpoint(checkpoint)
        separate = self.separate.state_dict()
        checkpoint[_STATE] = {
            "skipped": self.skipped.state_dict(),
            "gradient_norms": dict(self.gradient_norms),
            "empty_steps": dict(self.empty_steps),
            "losses_are_finite": not any_over_ranks(not self._losses_are_finite),
            "separate": save_rank_states(separate, name="separate_gradients") if separate else [],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore `on_save_checkpoint`'s state."""
        super().on_load_checkpoint(checkpoint)
        state = checkpoint.get(_STATE)
        # checkpoints of earlier versions have none
        if state is not None:
            self.skipped.load_state_dict(state["skipped"])
            self.gradient_norms = dict(state["gradient_norms"])
            self.empty_steps = dict(state.get("empty_steps", {}))
            self._losses_are_finite = state["losses_are_finite"]
            separate = state.get("separate", [])
            if len(separate) == world_size():
                self.separate.load_state_dict(separate[rank()])

    # ---- skipped steps

    def _lowers_scale(self) -> bool:
        """Return whether a gradient scaler takes the step for an overflow of its scale."""
        plugin = self.trainer.precision_plugin
        scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
        return scaler is not None and scaler.get_scale() > 1.0

    def _end_run(self, too_many: str) -> None:
        """Repeat and record the present step on all ranks, and raise."""
        from ragen_pl.modules.recording import (
            find,
            minibatches_of_step,
            present_step,
            record,
            repeat,
        )

        numbers = minibatches_of_step(self, max(self._random, default=0))
        step = present_step(self, numbers, random=self._random)
        finding, file = None, None
        if step is not None:
            finding = find(repeat(self, step))
            step.suspect = None if finding is None else finding.minibatch
            file = record(self, step, Path(self.trainer.default_root_dir) / FOLDER)
        found = gather_over_ranks((finding, file))
        ranks = [number for number, (each, _) in enumerate(found) if each is not None]
        # where no rank finds a reason, any rank's record is as good
        first_finding, first_file = found[ranks[0] if ranks else 0]
        name = self.phase if self.phase != UPDATE else f"iteration {self.trainer.current_epoch + 1}"
        raise SkippedStepsError(
            f"{name}, optimizer step {self.trainer.global_step + 1}: gradients or losses are not finite, and the "
            f"optimizer skipped {too_many}; {_described(first_finding, ranks, len(numbers))}",
            record=first_file,
        )


def _described(finding: Finding | None, ranks: list[int], minibatches: int) -> str:
    """Return the result of repeating the last step, in words."""
    if finding is None:
        return "a repetition of the last one shows finite numbers"
    part = f" in minibatch {finding.minibatch + 1} of {minibatches}" if minibatches > 1 else ""
    which = f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}"
    return f"on {which}, first at {finding.place} on rank {ranks[0]}{part}"
