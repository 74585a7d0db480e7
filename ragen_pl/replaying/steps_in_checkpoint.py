"""The optimizer step that a checkpoint inside an update is in, of all ranks, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from ragen_pl.data.batch import TrajectoryBatch
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.data.recorded_step import RecordedStep
from ragen_pl.modules.recording import UPDATE

Reduction = Callable[[Tensor], Tensor]


def steps_in_checkpoint(saved: Mapping[str, Any], settings: DictConfig) -> list[RecordedStep]:
    """Return the step that each rank of the run was in, or was to take next.

    Args:
        saved: What the checkpoint holds, with the states of all ranks.
        settings: Config of the run.

    Raises:
        ValueError: It was written outside an update, or after its last step.
    """
    data: Mapping[str, Any] = saved.get("RolloutDataModule", {})
    buffers: Sequence[Any] = list(data.get("buffers", [None]))
    if any(buffer is None for buffer in buffers):
        raise ValueError(
            "the checkpoint holds no samples; give one that was written inside an update, such as a signal's"
        )
    batches = [TrajectoryBatch.from_state_dict(buffer) for buffer in buffers]
    loaders = loaders_of(batches, settings, iteration=data["iteration"])
    positions = saved["loops"]["fit_loop"]["state_dict"].get("combined_loader") or [{"position": 0}]
    accumulate = loaders[0].accumulate
    first = positions[0]["position"] // accumulate * accumulate
    if first >= len(loaders[0]):
        raise ValueError(
            "the checkpoint was written after the last step of its update; give an earlier one"
        )
    return [
        RecordedStep(
            phase=UPDATE,
            iteration=data["iteration"] + 1,
            step=saved["global_step"] + 1,
            rank=rank,
            ranks=len(loaders),
            minibatches=[loader.minibatch(first + number) for number in range(accumulate)],
            random=[{}] * accumulate,
            suspect=None,
            weights="",
            versions={},
        )
        for rank, loader in enumerate(loaders)
    ]


def loaders_of(
    batches: Sequence[TrajectoryBatch], settings: DictConfig, *, iteration: int
) -> list[MinibatchLoader]:
    """Return the loader of each rank as the run had it.

    A loader asks for the ranks' numbers of rows, for the largest of their numbers of microbatches, and for the sum of
    their counts. Each is noted in one pass over the ranks, and known in the next.
    """
    rows: list[list[int]] = []
    maxima: list[Tensor] = []
    sums: list[Tensor] = []

    def build(
        rows_of_ranks: Callable[[list[int]], list[list[int]]],
        max_over_ranks: Reduction,
        sum_over_ranks: Reduction,
        *,
        known: bool = True,
    ) -> list[MinibatchLoader]:
        update = settings["update"]
        return [
            MinibatchLoader(
                batch,
                epochs=update.epochs,
                minibatches=update.minibatches,
                accumulate=settings.trainer.get("accumulate_grad_batches", 1),
                tokens_per_microbatch=update.tokens_per_microbatch,
                seed_key=(settings.seed, iteration, rank),
                rank=rank if known else 0,
                gather_over_ranks=rows_of_ranks,
                world_size=len(batches),
                sum_over_ranks=sum_over_ranks,
                max_over_ranks=max_over_ranks,
            )
            for rank, batch in enumerate(batches)
        ]

    def note(kept: list[Tensor]) -> Reduction:
        def noted(own: Tensor) -> Tensor:
            kept.append(own)
            return own

        return noted

    def note_rows(own: list[int]) -> list[list[int]]:
        rows.append(own)
        return [own]

    build(note_rows, lambda own: own, lambda own: own, known=False)
    build(lambda own: rows, note(maxima), lambda own: own)
    largest = torch.stack(maxima).amax(0)
    build(lambda own: rows, lambda own: largest, note(sums))
    total = torch.stack(sums).sum(0)
    return build(lambda own: rows, lambda own: largest, lambda own: total)
