"""The update phase's train loader: sized, seeded, and resumable at any minibatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ragen_pl.data.batch import Minibatch, TrajectoryBatch
from ragen_pl.seeding import derive_seed

SumOverRanks = Callable[[Tensor], Tensor]


class MinibatchLoader:
    """Yield `epochs x minibatches x accumulate` minibatches of a batch's samples.

    In each epoch every sample appears once, in an order drawn from `seed_key`. A rank with fewer
    samples than minibatches yields rows of weight 0, so that all ranks take as many steps.

    Args:
        batch: the iteration's samples.
        epochs: passes over the samples.
        minibatches: optimizer steps an epoch.
        accumulate: loader steps an optimizer step (the Trainer's `accumulate_grad_batches`).
        seed_key: what the order is drawn from: run seed, iteration, rank.
        world_size: ranks whose gradients are averaged.
        sum_over_ranks: adds a tensor up over all ranks; identity on one rank.
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
        # Lightning asks for no more than there are, so that nothing here runs after the last one
        first, self._start = self._start, 0
        self._position = first
        for number in range(first, len(self._plan)):
            self._position = number + 1
            yield self._minibatch(number)

    def state_dict(self) -> dict[str, int]:
        """Return the number of minibatches given out."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the minibatches that were given out."""
        self._position = self._start = state["position"]

    def _count(self, sum_over_ranks: SumOverRanks) -> Tensor:
        """Return what the losses of every optimizer step are divided by, over all ranks, `[steps, 4]`.

        The columns are trained tokens by their weights, tokens with credit, tokens held to the reference, samples.
        """
        samples = self.batch.samples
        real = samples.weight > 0
        masks = (samples.loss_weight, samples.advantage_mask, samples.kl_mask)
        of_row = torch.stack([*(mask.sum(1) * real for mask in masks), real.long()], dim=1).float()
        counts = torch.zeros(len(self._plan) // self.accumulate, of_row.shape[1])
        for number, rows in enumerate(self._plan):
            counts[number // self.accumulate] += of_row[rows].sum(0)
        return sum_over_ranks(counts).clamp(min=1)

    def _minibatch(self, number: int) -> Minibatch:
        rows, batch = self._plan[number], self.batch
        filler = len(rows) == 0
        samples = batch.samples.select(torch.zeros(1, dtype=torch.int64) if filler else rows)
        if filler:
            samples.weight.zero_()
            samples.loss_weight = samples.loss_weight * 0
            samples.loss_mask, samples.kl_mask = samples.loss_mask & False, samples.kl_mask & False
        used, images = torch.unique(samples.image_index, return_inverse=True)
        missing = int(bool(len(used) and used[0] < 0))
        samples.image_index = images.view_as(samples.image_index) - missing
        loss_tokens, advantage_tokens, kl_tokens, sequences = self._counts[
            number // self.accumulate
        ]
        return Minibatch(
            samples=samples,
            pixel_values=batch.pixel_values[used[missing:]]
            if len(batch.pixel_values)
            else batch.pixel_values,
            reference=None
            if batch.reference is None
            else batch.reference[samples.token[samples.turn >= 0]],
            entropy=batch.entropy,
            loss_tokens=loss_tokens,
            advantage_tokens=advantage_tokens,
            kl_tokens=kl_tokens,
            sequences=sequences,
            scale=float(self.world_size * self.accumulate),
        )
