"""The update phase's train loader: sized, seeded, and resumable at any minibatch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count
from ragen_pl.base.distributed import (
    gather_over_ranks,
    max_over_ranks,
    rank,
    sum_over_ranks,
    world_size,
)
from ragen_pl.base.seeding import derive_seed
from ragen_pl.data.batch import Minibatch, Samples, TrajectoryBatch
from ragen_pl.data.microbatches import (
    default_buckets,
    split_by_length,
    split_by_tokens,
    split_into,
)
from ragen_pl.data.settings import UpdateSettings

log = logging.getLogger(__name__)

OverRanks = Callable[[Tensor], Tensor]
_KINDS = 3


@dataclass(frozen=True, slots=True)
class _Part:
    """One minibatch of the plan."""

    rows: Tensor
    """int64, rows of the batch."""
    microbatches: list[Tensor]
    """Places in `rows` that are computed together."""


class MinibatchLoader:
    """Yield `epochs x minibatches x accumulate` minibatches of a batch's samples.

    Each epoch yields every sample once, in an order drawn from `seed_key`. Those with trained tokens are dealt to the
    minibatches first, one rank after the other, so that as few optimizer steps as possible have none, on any number of
    ranks. A rank with fewer samples than minibatches also yields padding rows, so all ranks take the same number of
    steps, and the same number of forward passes in each.

    With `tokens_per_microbatch` each minibatch is yielded in parts, of which one forward and backward pass fits into
    memory. Their number is the same for all minibatches and ranks. `accumulate` is then that many times larger, and
    the Trainer's `accumulate_grad_batches` has to be set to it.

    Args:
        batch: The iteration's samples.
        epochs: Passes over the samples.
        minibatches: Optimizer steps of an epoch.
        accumulate: Minibatches of an optimizer step (the Trainer's `accumulate_grad_batches`).
        tokens_per_microbatch: Positions of a microbatch, padding included; None to split a minibatch by length only.
        length_buckets: Largest number of microbatches of a minibatch, by length, without `tokens_per_microbatch`.
        seed_key: Seed of the order: run seed, iteration, rank.
        rank: Number of this rank.
        gather_over_ranks: Lists an object of each rank; that of this one on one rank.
        world_size: Number of ranks whose gradients are averaged.
        sum_over_ranks: Sums a tensor over the ranks; identity on one rank.
        max_over_ranks: Takes the maximum of a tensor's elements over the ranks; identity on one rank.
    """

    @checked
    def __init__(
        self,
        batch: TrajectoryBatch,
        *,
        epochs: int,
        minibatches: int,
        accumulate: int = 1,
        tokens_per_microbatch: Count | None = None,
        length_buckets: Count = 2,
        seed_key: tuple[int | str, ...] = (),
        rank: int = 0,
        gather_over_ranks: Callable[[list[int]], list[list[int]]] = lambda own: [own],
        world_size: int = 1,
        sum_over_ranks: OverRanks = lambda tensor: tensor,
        max_over_ranks: OverRanks = lambda tensor: tensor,
    ) -> None:
        self.batch = batch
        self.world_size = world_size
        self._position = self._start = 0
        of_row = _counts_of_rows(batch.samples)
        kinds = _kinds(of_row)
        counts = gather_over_ranks(torch.bincount(kinds, minlength=_KINDS).tolist())
        firsts = _first_places(counts, rank=rank)
        plan: list[Tensor] = []
        for epoch in range(epochs):
            generator = torch.Generator().manual_seed(derive_seed(*seed_key, "shuffle", epoch))
            order = torch.randperm(len(batch.samples), generator=generator)
            for step in _dealt(order, kinds, firsts, minibatches):
                plan.extend(step.tensor_split(accumulate))
        if tokens_per_microbatch is None:
            self._plan = self._by_length(plan, length_buckets, max_over_ranks)
            self.accumulate = accumulate
        else:
            self._plan = self._by_tokens(plan, tokens_per_microbatch, max_over_ranks)
            self.accumulate = accumulate * len(self._plan) // max(1, len(plan))
        self._episode_tokens = _episode_tokens(batch.samples)
        sums = self._count(of_row, sum_over_ranks)
        self._counted = sums[:, :4] > 0
        # sums of weights may be below 1
        self._counts = torch.where(sums > 0, sums, 1.0)

    def _by_length(
        self, plan: Sequence[Tensor], buckets: int, max_over_ranks: OverRanks
    ) -> list[_Part]:
        """Split each minibatch's rows by length, and add padding rows until all ranks have as many microbatches."""
        lengths = self.batch.samples.length
        split = [split_by_length(lengths[rows], buckets) if len(rows) else [] for rows in plan]
        counts = max_over_ranks(torch.tensor([max(1, len(own)) for own in split])).tolist()
        parts = []
        for rows, own, count in zip(plan, split, counts, strict=True):
            padding = [torch.tensor([len(rows) + number]) for number in range(count - len(own))]
            parts.append(_Part(rows, own + padding))
        return parts

    def _by_tokens(
        self, plan: Sequence[Tensor], tokens: int, max_over_ranks: OverRanks
    ) -> list[_Part]:
        """Split each minibatch into as many parts as the one that needs most, on any rank."""
        lengths = self.batch.samples.length
        needed = [len(split_by_tokens(lengths[rows], tokens)) for rows in plan if len(rows)]
        count = int(max_over_ranks(torch.tensor(max(needed, default=1))))
        return [
            _Part(rows[own], [torch.arange(max(1, len(own)))])
            for rows in plan
            for own in split_into(lengths[rows], count, tokens=tokens)
        ]

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[Minibatch]:
        # Lightning stops at the last minibatch, so no code here runs after it
        first, self._start = self._start, 0
        self._position = first
        for number in range(first, len(self._plan)):
            self._position = number + 1
            yield self.minibatch(number)

    def state_dict(self) -> dict[str, int]:
        """Return the number of minibatches yielded so far."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the minibatches that were yielded."""
        self._position = self._start = state["position"]

    def _count(self, of_row: Tensor, sum_over_ranks: OverRanks) -> Tensor:
        """Return the counts of every optimizer step over all ranks, float32 `[steps, 6]`.

        The columns are those of `_counts_of_rows`, and the episodes by the fraction of their tokens.
        """
        fractions = of_row[:, :1] / self._episode_tokens[:, None].clamp(min=1e-9)
        of_row = torch.cat([of_row, fractions], dim=1)
        counts = torch.zeros(len(self._plan) // self.accumulate, of_row.shape[1])
        for number, part in enumerate(self._plan):
            counts[number // self.accumulate] += of_row[part.rows].sum(0)
        return sum_over_ranks(counts)

    def minibatch(self, number: int) -> Minibatch:
        """Return one of the minibatches, counted from 0; the position stays."""
        part, batch = self._plan[number], self.batch
        samples = _selected(batch.samples, part)
        tokens, kept_ids = samples.token[samples.turn >= 0], batch.kept_ids
        reference, reference_ids, kl_weight = (
            None if each is None else each[tokens]
            for each in (batch.reference, batch.reference_ids, batch.kl_weight)
        )
        if kept_ids is not None:
            kept_ids = kept_ids.select(tokens)
        counts = self._counts[number // self.accumulate]
        loss_tokens, value_tokens, kl_tokens, text_tokens, sequences, episodes = counts
        return Minibatch(
            samples=samples,
            images=_keep_own_images(samples, batch.images),
            reference=reference,
            reference_ids=reference_ids,
            kl_weight=kl_weight,
            entropy=batch.entropy,
            kept_ids=kept_ids,
            loss_tokens=loss_tokens,
            value_tokens=value_tokens,
            kl_tokens=kl_tokens,
            text_tokens=text_tokens,
            counted=self._counted[number // self.accumulate],
            sequences=sequences,
            episodes=episodes,
            episode_tokens=self._episode_tokens[_rows(part)],
            microbatches=part.microbatches,
            ends_step=(number + 1) % self.accumulate == 0,
            scale=float(self.world_size * self.accumulate),
        )


class MinibatchDataModule(pl.LightningDataModule):
    """Serve a batch as minibatches, and have the Trainer accumulate the microbatches of each.

    Args:
        update: Sizes of minibatches and microbatches.
    """

    def __init__(self, update: UpdateSettings) -> None:
        super().__init__()
        self.update = update
        # None before `setup`
        self._accumulate: int | None = None

    def setup(self, stage: str) -> None:
        """Keep the Trainer's own number of accumulated minibatches."""
        if self.trainer is not None:
            self._accumulate = self.trainer.accumulate_grad_batches

    def teardown(self, stage: str) -> None:
        """Give the Trainer its own number back."""
        if self.trainer is not None and self._accumulate is not None:
            self.trainer.accumulate_grad_batches = self._accumulate

    def on_exception(self, exception: BaseException) -> None:
        """Tear down, which Lightning does not do after an error."""
        self.teardown("fit")

    def minibatches_of(
        self,
        batch: TrajectoryBatch,
        *,
        epochs: int,
        minibatches: int,
        seed_key: tuple[int | str, ...],
    ) -> MinibatchLoader:
        """Return the loader over a batch. The arguments are those of `MinibatchLoader`.

        Raises:
            ValueError: The Trainer's strategy accumulates a number of minibatches that can't be changed.
        """
        order = self.order(epochs=epochs, minibatches=minibatches, seed_key=seed_key)
        return self.minibatches_in(order, batch)

    def order(
        self, *, epochs: int, minibatches: int, seed_key: tuple[int | str, ...]
    ) -> dict[str, Any]:
        """Return what the minibatches of a batch follow from, as arguments of `MinibatchLoader`."""
        return {
            "epochs": epochs,
            "minibatches": minibatches,
            "accumulate": self._accumulate or 1,
            "tokens_per_microbatch": self.update.tokens_per_microbatch,
            "length_buckets": self.update.length_buckets or default_buckets(self._device),
            "seed_key": seed_key,
        }

    def minibatches_in(self, order: Mapping[str, Any], batch: TrajectoryBatch) -> MinibatchLoader:
        """Return the loader over a batch, in the order of `order`'s result."""
        loader = MinibatchLoader(
            batch,
            **{**order, "seed_key": (*order["seed_key"], rank())},
            rank=rank(),
            gather_over_ranks=gather_over_ranks,
            world_size=world_size(),
            sum_over_ranks=sum_over_ranks,
            max_over_ranks=max_over_ranks,
        )
        self._report_long_samples(batch.samples)
        if self.trainer is not None:
            self._set_accumulation(loader.accumulate)
        return loader

    @property
    def _device(self) -> torch.device:
        """Device that computes the minibatches."""
        if self.trainer is None:
            return torch.device("cpu")
        device: torch.device = self.trainer.strategy.root_device
        return device

    def _set_accumulation(self, microbatches: int) -> None:
        assert self.trainer is not None
        strategy, tokens = self.trainer.strategy, self.update.tokens_per_microbatch
        if microbatches != self._accumulate and strategy.handles_gradient_accumulation:
            raise ValueError(
                f"update.tokens_per_microbatch={tokens}: {type(strategy).__name__} accumulates a "
                "fixed number of microbatches; set null and trainer.accumulate_grad_batches, or another strategy"
            )
        self.trainer.accumulate_grad_batches = microbatches

    def _report_long_samples(self, samples: Samples) -> None:
        limit = self.update.tokens_per_microbatch
        longer = 0 if limit is None else int((samples.length > limit).sum())
        if longer:
            log.warning(
                f"update.tokens_per_microbatch={limit}: {longer} of {len(samples)} samples are longer, up to "
                f"{int(samples.length.max())} tokens; each is a microbatch of its own"
            )


def _counts_of_rows(samples: Samples) -> Tensor:
    """Return counts of each row, float32 `[rows, 5]`, 0 for padding rows.

    The columns are the tokens in M_loss by their weights, the critic's tokens, the KL tokens, the predicted tokens of
    text and the samples.
    """
    counted = samples.weight > 0
    masks = (samples.loss_weight, samples.value_mask, samples.kl_mask, samples.text > 0)
    sums = [mask.sum(1) * counted for mask in masks]
    return torch.stack([*sums, counted.long()], dim=1).float()


def _kinds(of_row: Tensor) -> Tensor:
    """Return which rows have tokens in M_loss (0), tokens for other terms of the loss alone (1), none (2)."""
    has = of_row[:, :4] > 0
    return torch.where(has[:, 0], 0, torch.where(has.any(dim=1), 1, 2))


def _first_places(counts: Sequence[Sequence[int]], *, rank: int) -> list[int]:
    """Return the place of a rank's first row of each kind among the rows of all ranks, kind after kind.

    Args:
        counts: Rows of each kind, by rank.
        rank: Number of the rank.

    >>> _first_places([[2, 0, 1], [3, 1, 0]], rank=1)
    [2, 5, 7]
    """
    of_rank = torch.tensor(counts).T
    before = of_rank.flatten().cumsum(0).view_as(of_rank) - of_rank
    firsts: list[int] = before[:, rank].tolist()
    return firsts


def _dealt(order: Tensor, kinds: Tensor, firsts: Sequence[int], minibatches: int) -> list[Tensor]:
    """Split rows into minibatches; each kind of row is dealt in turn, from its first place on.

    >>> _dealt(torch.arange(5), torch.tensor([0, 2, 0, 2, 2]), [0, 2, 2], 3)
    [tensor([0, 1]), tensor([2, 3]), tensor([4])]
    """
    parts: list[list[Tensor]] = [[] for _ in range(minibatches)]
    for kind, first in enumerate(firsts):
        rows = order[kinds[order] == kind]
        before = torch.arange(minibatches - 1, -1, -1)
        sizes = (first + len(rows) + before) // minibatches - (first + before) // minibatches
        for part, own in zip(parts, rows.split(sizes.tolist()), strict=True):
            part.append(own)
    return [torch.cat(part) for part in parts]


def whole_minibatch(batch: TrajectoryBatch) -> Minibatch:
    """Return all samples of a batch as the input of one training step. All ranks must call it."""
    (minibatch,) = MinibatchLoader(
        batch,
        epochs=1,
        minibatches=1,
        world_size=world_size(),
        sum_over_ranks=sum_over_ranks,
        max_over_ranks=max_over_ranks,
    )
    return minibatch


def _episode_tokens(samples: Samples) -> Tensor:
    """Return the tokens in M_loss of each row's whole episode by their weights, float32 `[rows]`."""
    of_row = samples.loss_weight.sum(1) * (samples.weight > 0)
    count = int(samples.episode.max()) + 1 if len(samples) else 0
    return of_row.new_zeros(count).index_add(0, samples.episode, of_row)[samples.episode]


def _rows(part: _Part) -> Tensor:
    """Return the batch's rows at a minibatch's places; places beyond its own rows, padding rows, have row 0."""
    count = sum(len(places) for places in part.microbatches)
    return torch.cat([part.rows, part.rows.new_zeros(count - len(part.rows))])


def _selected(samples: Samples, part: _Part) -> Samples:
    """Return a minibatch's samples; places beyond its rows are padding rows."""
    rows = _rows(part)
    selected = samples.select(rows)
    padding = torch.arange(len(rows)) >= len(part.rows)
    selected.weight[padding] = 0
    selected.loss_weight[padding] = 0
    selected.loss_mask[padding] = selected.kl_mask[padding] = False
    return selected


def _keep_own_images(samples: Samples, images: Sequence[Tensor]) -> list[Tensor]:
    """Return the images of these samples and number `image_index` accordingly."""
    used, index = torch.unique(samples.image_index, return_inverse=True)
    missing = int(bool(len(used) and used[0] < 0))
    samples.image_index = index.view_as(samples.image_index) - missing
    return [images[number] for number in used[missing:].tolist()]
