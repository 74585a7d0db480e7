"""TrajectoryBatch: an iteration's trajectories as tensors.

Rows are *samples* (one forward sequence each: a whole episode, a window of turns or one turn);
credit is assigned over *episodes*, whose tokens may be spread over several samples.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from ragen_pl.algorithms.credit import Credit


@dataclass(kw_only=True, slots=True)
class Samples:
    """Token sequences to train on, right-padded. Every field's first axis is the row.

    A worked example, one turn a sample, prompt `u o`, response `r s <end>`::

        input_ids    u  o  r  s  <end>
        loss_mask    0  0  1  1  1
        turn        -1 -1  0  0  0
        token       -1 -1  0  1  2
    """

    input_ids: Tensor  # int64 [rows, time]
    length: Tensor  # int64 [rows]
    loss_mask: Tensor  # bool [rows, time]: sampled tokens that are trained on (M_loss)
    loss_weight: (
        Tensor  # float32 [rows, time]: of a token in the policy's loss, above 0 inside M_loss
    )
    advantage_mask: Tensor  # bool [rows, time]: tokens that credit is assigned over (M_adv)
    kl_mask: Tensor  # bool [rows, time]: tokens that are held to the reference policy
    turn: Tensor  # int64 [rows, time]: index of the turn in its episode, -1 off the sampled tokens
    token: Tensor  # int64 [rows, time]: number of the sampled token in the batch, -1 elsewhere
    spans: Tensor  # int8 [rows, time]: a Span on sampled tokens, 0 elsewhere
    behavior_logprobs: Tensor  # float32 [rows, time]
    temperature: Tensor  # float32 [rows, time]: that a token was sampled at, 1 elsewhere
    image_index: Tensor  # int64 [rows, most images]: indices into the batch's images, -1 for none
    patches: Tensor  # bool [rows, most images, patches]: those shown; [rows, 0, 0] where all images are whole
    episode: Tensor  # int64 [rows]
    weight: Tensor  # float32 [rows]: 0 for rows that only make numbers even
    advantages: Tensor  # float32 [rows, time]
    returns: Tensor  # float32 [rows, time]: value targets
    values: Tensor  # float32 [rows, time]: before the update

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def sampled(self) -> Tensor:
        """Bool `[rows, time]`: sampled tokens of rows that count."""
        return (self.turn >= 0) & (self.weight > 0)[:, None]

    def select(self, rows: Tensor) -> Self:
        """Return these rows, cut to the longest of them."""
        time = int(self.length[rows].max()) if len(rows) else 0
        chosen = {}
        for field in fields(self):
            value = getattr(self, field.name)[rows]
            per_token = value.ndim == 2 and field.name != "image_index"
            chosen[field.name] = value[:, :time] if per_token else value
        return type(self)(**chosen)


@dataclass(kw_only=True, slots=True)
class Episodes:
    """What is known of each episode. Every field's first axis is the episode."""

    turn_rewards: Tensor  # float32 [episodes, most turns]: 0 beyond the last turn
    turns: Tensor  # int64 [episodes]
    group: Tensor  # int64 [episodes]: index of the group in the iteration, over all ranks
    member: Tensor  # int64 [episodes]: number within the group
    hit_length_limit: Tensor  # bool [episodes, most turns]: the response hit its length limit
    state: (
        Tensor  # int64 [episodes, most turns]: number of the state at the turn's start, -1 unknown
    )
    weight: Tensor  # float32 [episodes]: times the policy's loss, 1 unless a group filter says otherwise
    truncated: Tensor  # bool [episodes]: cut from outside, bootstrapped with `bootstrap`
    bootstrap: (
        Tensor  # float32 [episodes]: value of the state after the last turn, 0 where terminated
    )


@dataclass(kw_only=True, slots=True)
class TrajectoryBatch:
    """All samples of an iteration, their episodes and their images (each one once)."""

    samples: Samples
    episodes: Episodes
    pixel_values: Tensor  # [images, …] as the processor gives them; empty [0] without images
    final: Samples | None = (
        None  # prompts after the last turn of truncated episodes, in `episode` order
    )
    reference: Tensor | None = (
        None  # float32 [tokens] or [tokens, vocab]: the reference policy's log-probs
    )
    entropy: float = 0.0  # mean over the trained tokens before the update, nats


@dataclass(kw_only=True, slots=True)
class Minibatch:
    """What one training step sees. Denominators count over all ranks and accumulated steps."""

    samples: Samples
    pixel_values: Tensor
    reference: Tensor | None
    entropy: float  # mean over the trained tokens of the iteration before its update, nats
    tokens: Tensor  # float32 []: trained tokens (M_loss) of the optimizer step, by their weights
    credited: Tensor  # float32 []: tokens inside M_adv of the optimizer step
    kl_tokens: Tensor  # float32 []: tokens held to the reference of the optimizer step
    sequences: Tensor  # float32 []: samples of the optimizer step
    scale: float  # times the local sum, so that what DDP averages is the global mean

    @property
    def real(self) -> Tensor:
        """Bool `[rows, 1]`: the rows that are not there to make numbers even."""
        return (self.samples.weight > 0)[:, None]


def credit_layout(batch: TrajectoryBatch) -> tuple[Credit, Tensor, Tensor]:
    """Lay the sampled tokens of each episode out in one row, whatever samples they stand in.

    Returns:
        The credit problem `[episodes, tokens]` (rewards not yet placed), and the row and column of
        each of its tokens in the batch's samples, int64 `[episodes, tokens]`, -1 on padding.
    """
    samples, episodes = batch.samples, batch.episodes
    rows, columns = samples.sampled.nonzero(as_tuple=True)
    order = torch.argsort(samples.token[rows, columns])
    rows, columns = rows[order], columns[order]
    episode, count = samples.episode[rows], len(episodes.turns)
    sizes = torch.bincount(episode, minlength=count)
    starts = sizes.cumsum(0) - sizes
    place = torch.arange(len(episode), device=episode.device) - starts[episode]
    shape = (count, max(1, int(sizes.max())) if count else 1)  # a column at least, to index in
    at_row = torch.full(shape, -1, dtype=torch.int64, device=episode.device)
    at_column = at_row.clone()
    at_row[episode, place], at_column[episode, place] = rows, columns
    # every sampled token has its place, trained on or not: credit passes through all of them
    credit = Credit(
        rewards=torch.zeros(shape, device=episode.device),
        values=gather_credit(samples.values, at_row, at_column),
        advantage_mask=gather_credit(samples.advantage_mask, at_row, at_column),
        loss_mask=gather_credit(samples.loss_mask, at_row, at_column),
        turn=gather_credit(samples.turn, at_row, at_column, fill=-1),
        group=episodes.group,
        bootstrap=episodes.bootstrap,
        returns=episodes.turn_rewards.sum(1),
        state=episodes.state if bool((episodes.state >= 0).any()) or not count else None,
    )
    return credit, at_row, at_column


def gather_credit(values: Tensor, rows: Tensor, columns: Tensor, *, fill: float = 0) -> Tensor:
    """Carry a figure per token from the samples to the credit layout; `fill` on its padding."""
    inside = values[rows.clamp(min=0), columns.clamp(min=0)]
    return torch.where(rows >= 0, inside, values.new_full((), fill))


def scatter_credit(values: Tensor, rows: Tensor, columns: Tensor, *, like: Tensor) -> Tensor:
    """Carry a figure per token from the credit layout to the samples; 0 on all other positions."""
    real = rows >= 0
    result = torch.zeros_like(like)
    result[rows[real], columns[real]] = values[real].to(like.dtype)
    return result


def tensors(value: Samples | Episodes | TrajectoryBatch | None) -> dict[str, object] | None:
    """Return a dataclass of tensors as nested dictionaries, for a checkpoint."""
    if value is None:
        return None
    return {
        field.name: tensors(part) if isinstance(part, Samples | Episodes) else part
        for field in fields(value)
        for part in (getattr(value, field.name),)
    }


def from_tensors(state: dict[str, object] | None) -> TrajectoryBatch | None:
    """Rebuild what `tensors` took apart."""
    if state is None:
        return None
    final = state["final"]
    return TrajectoryBatch(
        samples=_samples(state["samples"]),
        episodes=Episodes(**state["episodes"]),  # type: ignore[arg-type]
        pixel_values=state["pixel_values"],  # type: ignore[arg-type]
        final=None if final is None else _samples(final),
        reference=state["reference"],  # type: ignore[arg-type]
        entropy=state["entropy"],  # type: ignore[arg-type]
    )


def _samples(state: object) -> Samples:
    """Rebuild samples; checkpoints of older versions have whole images alone."""
    assert isinstance(state, dict)
    none = torch.zeros(len(state["input_ids"]), 0, 0, dtype=torch.bool)
    return Samples(**({"patches": none} | state))
