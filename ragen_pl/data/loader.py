"""The update phase's train loader: sized, seeded, and resumable at any minibatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ragen_pl.data.batch import Minibatch, Samples, TrajectoryBatch
from ragen_pl.seeding import derive_seed

SumOverRanks = Callable[[Tensor], Tensor]


class MinibatchLoader:
    """Yield `epochs x minibatches x accumulate` minibatches of a batch's samples.

    Each epoch yields every sample once, in an order drawn from `seed_key`. A rank with fewer samples than
    minibatches also yields padding rows, so all ranks take the same number of steps.

    Args:
        batch: the iteration's samples.
        epochs: passes over the samples.
        minibatches: optimizer steps of an epoch.
        accumulate: minibatches of an optimizer step (the Trainer's `accumulate_grad_batches`).
        seed_key: seed of the order: run seed, iteration, rank.
        world_size: number of ranks whose gradients are averaged.
        sum_over_ranks: sums a tensor over the ranks; identity on one rank.
    """

    def __init__(
        self,
        batch: TrajectoryBatch,
        *,
        epochs: int,
        minibatches: int,
        accumulate: int = 1,
        seed_key: tuple[int | str, ...] = (),
        world_size: int = 1,
        sum_over_ranks: SumOverRanks = lambda tensor: tensor,
    ) -> None:
        self.batch = batch
        self.accumulate = accumulate
        self.world_size = world_size
        self._position = self._start = 0
        self._plan: list[Tensor] = []
        for epoch in range(epochs):
            generator = torch.Generator().manual_seed(derive_seed(*seed_key, "shuffle", epoch))
            order = torch.randperm(len(batch.samples), generator=generator)
            for step in order.tensor_split(minibatches):
                self._plan.extend(step.tensor_split(accumulate))
        self._counts = self._count(sum_over_ranks)

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[Minibatch]:
        # Lightning stops at the last minibatch, so no code here runs after it
        first, self._start = self._start, 0
        self._position = first
        for number in range(first, len(self._plan)):
            self._position = number + 1
            yield self._minibatch(number)

    def state_dict(self) -> dict[str, int]:
        """Return the number of minibatches yielded so far."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the minibatches that were yielded."""
        self._position = self._start = state["position"]

    def _count(self, sum_over_ranks: SumOverRanks) -> Tensor:
        """Return the counts of every optimizer step over all ranks, float32 `[steps, 4]`.

        The columns are the tokens in M_loss by their weights, the tokens in M_adv, the KL tokens, and the samples.
        """
        samples = self.batch.samples
        counted = samples.weight > 0
        masks = (samples.loss_weight, samples.advantage_mask, samples.kl_mask)
        sums = [mask.sum(1) * counted for mask in masks]
        of_row = torch.stack([*sums, counted.long()], dim=1).float()
        counts = torch.zeros(len(self._plan) // self.accumulate, of_row.shape[1])
        for number, rows in enumerate(self._plan):
            counts[number // self.accumulate] += of_row[rows].sum(0)
        return sum_over_ranks(counts).clamp(min=1)

    def _minibatch(self, number: int) -> Minibatch:
        rows, batch = self._plan[number], self.batch
        samples = batch.samples.select(rows) if len(rows) else _padding_row(batch.samples)
        reference = batch.reference
        if reference is not None:
            reference = reference[samples.token[samples.turn >= 0]]
        counts = self._counts[number // self.accumulate]
        loss_tokens, advantage_tokens, kl_tokens, sequences = counts
        return Minibatch(
            samples=samples,
            images=_keep_own_images(samples, batch.images),
            reference=reference,
            entropy=batch.entropy,
            loss_tokens=loss_tokens,
            advantage_tokens=advantage_tokens,
            kl_tokens=kl_tokens,
            sequences=sequences,
            scale=float(self.world_size * self.accumulate),
        )


def _padding_row(samples: Samples) -> Samples:
    row = samples.select(torch.zeros(1, dtype=torch.int64))
    row.weight.zero_()
    row.loss_weight = row.loss_weight * 0
    row.loss_mask, row.kl_mask = row.loss_mask & False, row.kl_mask & False
    return row


def _keep_own_images(samples: Samples, images: Sequence[Tensor]) -> list[Tensor]:
    """Return the images of these samples and number `image_index` accordingly."""
    used, index = torch.unique(samples.image_index, return_inverse=True)
    missing = int(bool(len(used) and used[0] < 0))
    samples.image_index = index.view_as(samples.image_index) - missing
    return [images[number] for number in used[missing:].tolist()]
