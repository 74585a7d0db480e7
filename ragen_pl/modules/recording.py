"""An optimizer step that is written to files, and one that is repeated part by part."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor

from ragen_pl.base.distributed import on_first_rank, rank, world_size
from ragen_pl.base.files import atomic_write
from ragen_pl.base.seeding import restore_random_state
from ragen_pl.base.settings_files import SETTINGS
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.data.recorded_step import RecordedStep
from ragen_pl.modules.frozen import FINGERPRINTS, without_frozen
from ragen_pl.modules.optimized import UPDATE, OptimizedModule

if TYPE_CHECKING:
    from ragen_pl.modules.tracing import StepTrace

log = logging.getLogger(__name__)

RandomStates = Mapping[int, Mapping[str, Tensor]]
"""States of torch's generators, by the number of the minibatch that they are of."""

_PACKAGES = ("ragen_pl", "torch", "lightning", "transformers")


@dataclass(frozen=True, slots=True)
class Finding:
    """The first number of a step that is not finite.

    Attributes:
        minibatch: Index of its minibatch in the step.
        place: Where it is, in words.
    """

    minibatch: int
    place: str


def minibatches_of_step(module: LightningModule, batch_idx: int) -> range:
    """Return the numbers of the minibatches that an optimizer step accumulates up to one of them."""
    accumulate = module.trainer.accumulate_grad_batches
    return range(batch_idx // accumulate * accumulate, batch_idx + 1)


def present_step(
    module: OptimizedModule, numbers: Sequence[int], *, random: RandomStates
) -> RecordedStep | None:
    """Return the optimizer step that a module is in; None where its loader does not give a minibatch again.

    Args:
        module: The module.
        numbers: Numbers of the step's minibatches in the loader.
        random: States before these minibatches, those that are known.
    """
    trainer = module.trainer
    loader = trainer.train_dataloader
    if not isinstance(loader, MinibatchLoader):
        return None
    iteration = trainer.current_epoch + 1 if module.phase == UPDATE else 0
    name = f"{iteration:04d}" if iteration else module.phase.replace(" ", "_")
    return RecordedStep(
        phase=module.phase,
        iteration=iteration,
        step=trainer.global_step + 1,
        rank=rank(),
        ranks=world_size(),
        minibatches=[loader.minibatch(number) for number in numbers],
        random=[dict(random.get(number, {})) for number in numbers],
        suspect=None,
        weights=f"{name}_{trainer.global_step + 1:05d}_weights.pt",
        versions=_versions(),
    )


def repeat(module: OptimizedModule, step: RecordedStep) -> list[StepTrace]:
    """Repeat the forward and backward passes of a step, without the optimizer. All ranks must call it.

    Args:
        module: The module with the weights before the step. Its gradients are those of the last pass afterwards.
        step: The step.
    """
    # of `replay` only
    from ragen_pl.modules.tracing import trace_step

    traces = []
    for minibatch, state in zip(step.minibatches, step.random, strict=True):
        restore_random_state(state)
        with torch.enable_grad():
            traces.append(
                trace_step(
                    module,
                    module.losses,
                    move_data_to_device(minibatch, module.device),
                    forward_context=module.trainer.precision_plugin.train_step_context(),
                )
            )
    return traces


def find(traces: Sequence[StepTrace]) -> Finding | None:
    """Return the first number of a step that is not finite, None if all are finite."""
    places = (trace.first_non_finite() for trace in traces)
    return next((Finding(n, place) for n, place in enumerate(places) if place is not None), None)


def record(module: OptimizedModule, step: RecordedStep, folder: Path) -> Path | None:
    """Write a step, each rank its own file, and the weights before it. All ranks must call it.

    Args:
        module: The module with these weights.
        step: The step.
        folder: Where to write.

    Returns:
        This rank's file; None if it could not be written, which is logged.
    """
    state = on_first_rank(module.trainer.strategy.lightning_module_state_dict())
    file = folder / step.weights.replace("weights", str(step.rank))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if step.rank == 0:
            saved = {
                "module": without_frozen(module, state),
                FINGERPRINTS: module.fingerprints,
                SETTINGS: module.present_settings(),
            }
            with atomic_write(folder / step.weights) as partial:
                torch.save(saved, partial)
        step.write(file)
    except OSError as error:
        log.warning("%s cannot be written: %s", file, error)
        return None
    return file


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "unknown"
    return versions
