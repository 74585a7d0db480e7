"""TrajectoryBatch: an iteration's trajectories as tensors.

Rows are *samples* (one forward sequence each: a whole episode, a window of turns or one turn). Credit is
assigned over *episodes*, whose tokens may be spread over several samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from torch import Tensor

from ragen_pl.models.truncation import KeptIds
from ragen_pl.trajectory import Span


@dataclass(kw_only=True, slots=True)
class Samples:
    """Token sequences to train on, right-padded. Every field's first axis is the row.

    A worked example, one turn a sample, prompt `u o`, response `r s <end>`::

        input_ids    u  o  r  s  <end>
        loss_mask    0  0  1  1  1
        turn        -1 -1  0  0  0
        token       -1 -1  0  1  2
    """

    input_ids: Tensor
    """int64 `[rows, time]`."""
    length: Tensor
    """int64 `[rows]`, number of tokens."""
    loss_mask: Tensor
    """bool `[rows, time]`, sampled tokens that are trained on (M_loss)."""
    loss_weight: Tensor
    """float32 `[rows, time]`, weight of a token in the policy's loss, above 0 inside M_loss."""
    advantage_mask: Tensor
    """bool `[rows, time]`, tokens that credit is assigned over (M_adv)."""
    kl_mask: Tensor
    """bool `[rows, time]`, KL tokens: those with a penalty on the divergence from the reference policy."""
    turn: Tensor
    """int64 `[rows, time]`, index among its episode's trained turns, -1 off their sampled tokens."""
    token: Tensor
    """int64 `[rows, time]`, number of the sampled token in the batch, turn after turn of an episode, -1 elsewhere."""
    spans: Tensor
    """int8 `[rows, time]`, a `Span` on sampled tokens, 0 elsewhere."""
    text: Tensor
    """int8 `[rows, time]`, a `Role` on the environment's text that follows a response and is predicted, 0 elsewhere."""
    rollout_logprobs: Tensor
    """float32 `[rows, time]`, of the sampled tokens under the distribution sampled from, as the engine gave them; 0
    elsewhere."""
    old_logprobs: Tensor
    """float32 `[rows, time]`, log-probs before the update, which the policy's loss takes its ratio to. They are the
    trainer's on shown text and with `algorithm.loss.mismatch`, else `rollout_logprobs`."""
    temperature: Tensor
    """float32 `[rows, time]`, sampling temperature of a token, 1 elsewhere."""
    image_index: Tensor
    """int64 `[rows, max images]`, indices into the batch's images, -1 for none."""
    patches: Tensor
    """bool `[rows, max images, patches]`, patches shown; `[rows, 0, 0]` if every image is whole."""
    episode: Tensor
    """int64 `[rows]`, index of the episode."""
    weight: Tensor
    """float32 `[rows]`, 0 for padding rows, which do not count; that of a record in the warm start, 1 elsewhere."""
    advantages: Tensor
    """float32 `[rows, time]`."""
    returns: Tensor
    """float32 `[rows, time]`, targets of the critic."""
    values: Tensor
    """float32 `[rows, time]`, before the update."""

    @classmethod
    def of_one_turn(
        cls,
        input_ids: Tensor,
        sampled: Tensor,
        *,
        length: Tensor,
        image_index: Tensor,
        advantages: Tensor | None = None,
    ) -> Self:
        """Return samples of one turn each, all of whose sampled tokens are trained on; benchmarks and plans use them.

        Args:
            input_ids: int64 `[rows, time]`.
            sampled: Bool `[rows, time]`, the sampled tokens.
            length: int64 `[rows]`.
            image_index: int64 `[rows, max images]`, whole images.
            advantages: float32 `[rows, time]`; 0 if None.
        """
        rows, zeros = len(input_ids), torch.zeros(input_ids.shape)
        number = sampled.flatten().cumsum(0).view(sampled.shape) - 1
        return cls(
            input_ids=input_ids,
            length=length,
            loss_mask=sampled,
            loss_weight=sampled.float(),
            advantage_mask=sampled,
            kl_mask=sampled,
            turn=torch.where(sampled, 0, -1),
            token=torch.where(sampled, number, -1),
            spans=sampled.to(torch.int8),
            text=torch.zeros(input_ids.shape, dtype=torch.int8),
            rollout_logprobs=zeros,
            old_logprobs=zeros,
            temperature=torch.ones(input_ids.shape),
            image_index=image_index,
            patches=torch.zeros(rows, 0, 0, dtype=torch.bool),
            episode=torch.arange(rows),
            weight=torch.ones(rows),
            advantages=zeros if advantages is None else advantages,
            returns=zeros,
            values=zeros,
        )

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def sampled(self) -> Tensor:
        """Sampled tokens of non-padding rows, bool `[rows, time]`."""
        return (self.turn >= 0) & (self.weight > 0)[:, None]

    @property
    def value_mask(self) -> Tensor:
        """Tokens that the critic learns at, bool `[rows, time]`: all of M_adv, and the sampled ones of M_loss."""
        return self.advantage_mask | (self.loss_mask & (self.spans != Span.SHOWN))

    def select(self, rows: Tensor) -> Self:
        """Return these rows, shortened to the longest of them."""
        time = int(self.length[rows].max()) if len(rows) else 0
        selected = {}
        for column in fields(self):
            value = getattr(self, column.name)[rows]
            per_token = value.ndim == 2 and column.name != "image_index"
            selected[column.name] = value[:, :time] if per_token else value
        return type(self)(**selected)


@dataclass(kw_only=True, slots=True)
class Episodes:
    """Rewards and other facts of each episode and its trained turns. Every field's first axis is the episode."""

    turn_rewards: Tensor
    """float32 `[episodes, max turns]`, 0 beyond the last turn; they hold the rewards of untrained turns too."""
    turns: Tensor
    """int64 `[episodes]`, number of trained turns."""
    group: Tensor
    """int64 `[episodes]`, index of the group in the iteration, over all ranks."""
    member: Tensor
    """int64 `[episodes]`, number within the group."""
    hit_length_limit: Tensor
    """bool `[episodes, max turns]`, whether the response hit its length limit."""
    state: Tensor
    """int64 `[episodes, max turns]`, number of the state at the turn's start, -1 for unknown."""
    final_state: Tensor
    """int64 `[episodes]`, number of the state after the last turn, -1 for unknown."""
    potential: Tensor
    """float32 `[episodes, max turns]`, potential of the state at the turn's start, -inf where it is not recorded."""
    final_potential: Tensor
    """float32 `[episodes]`, potential of the state after the last turn, likewise."""
    advances: Tensor
    """bool `[episodes, max turns]`, whether the turn is a step that discounts count; True beyond the last turn."""
    success: Tensor
    """int8 `[episodes]`, whether the task was solved, -1 where the environment does not say so."""
    terms: Tensor
    """float64 `[episodes, terms]`, sum of each reward term over all turns; their names are `TrajectoryBatch.terms`."""
    environment: Tensor
    """int64 `[episodes]`, number of the environment in `TrajectoryBatch.shares`, 0 where there is one environment."""
    weight: Tensor
    """float32 `[episodes]`, factor of the policy's loss, 1 unless a group filter changes it."""
    truncated: Tensor
    """bool `[episodes]`, whether the episode was truncated and `bootstrap` applies."""
    bootstrap: Tensor
    """float32 `[episodes]`, value of the state after the last turn, 0 where the task ended."""

    def select(self, episodes: Tensor) -> Self:
        """Return these episodes."""
        return type(self)(
            **{each.name: getattr(self, each.name)[episodes] for each in fields(self)}
        )


@dataclass(kw_only=True, slots=True)
class TrajectoryBatch:
    """All samples of an iteration, their episodes and their images (each one once)."""

    samples: Samples
    episodes: Episodes
    images: list[Tensor]
    """RGB images, each uint8 `[height, width, 3]`; the model's processor turns them into its inputs when it runs."""
    final: Samples | None = None
    """Prompts after the last turn of truncated episodes, in the order of `episode`."""
    hinted: Samples | None = None
    """The same responses behind the prompts of a teacher that reads hints, until it has scored them."""
    reference: Tensor | None = None
    """The reference policy's log-probs of the sampled tokens, float32 `[tokens]`, or its states `[tokens, hidden]`, or
    its log-probs of `reference_ids` and of all others together, float32 `[tokens, k + 1]`."""
    reference_ids: Tensor | None = None
    """The reference's most likely ids at the sampled tokens, int32 `[tokens, k]`, if their log-probs are all that is
    known of it; see `TopLogprobs`."""
    kl_weight: Tensor | None = None
    """Weight of the divergence at the sampled tokens, float32 `[tokens]`; None for 1 each."""
    entropy: float = 0.0
    """Mean over the trained tokens before the update, nats."""
    kept_ids: KeptIds | None = None
    """Ids that sampling kept at the sampled tokens, by `samples.token`; None for all."""
    has_values: bool = False
    """Whether the engine has read `samples.values`, at all sampled tokens."""
    terms: tuple[str, ...] = ()
    """Names of the reward terms of this rank's episodes."""
    shares: dict[str, float] = field(default_factory=dict)
    """Share of each environment of a mixture, by name, the same on every rank; empty where there is one environment."""

    def state_dict(self) -> dict[str, Any]:
        """Return nested dictionaries of tensors, for a checkpoint."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        state["samples"] = _tensors(self.samples)
        state["episodes"] = _tensors(self.episodes)
        for name, samples in (("final", self.final), ("hinted", self.hinted)):
            state[name] = None if samples is None else _tensors(samples)
        state["kept_ids"] = None if self.kept_ids is None else _tensors(self.kept_ids)
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the batch of a `state_dict`."""
        final, hinted = state["final"], state.get("hinted")
        parts = {
            "samples": _samples(state["samples"]),
            "episodes": Episodes(**_with_later_columns(state["episodes"])),
            "final": None if final is None else _samples(final),
            "hinted": None if hinted is None else _samples(hinted),
        }
        return cls(**{**_current(state), **parts})


def _samples(columns: Mapping[str, Tensor]) -> Samples:
    """Return the samples of a state; in one of an earlier version no text is predicted, and log-probs were one column.

    That column held what is now `old_logprobs`. The engine's are read before an update only.
    """
    current = {"text": torch.zeros_like(columns["spans"]), **columns}
    if (former := current.pop("behavior_logprobs", None)) is not None:
        current |= {"rollout_logprobs": former, "old_logprobs": former}
    return Samples(**current)


def _current(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the ids that sampling kept; in one of an earlier version they have another name, or lack."""
    current = {"kept_ids": state.get("kept"), **state}
    current.pop("kept", None)
    if current["kept_ids"] is not None:
        current["kept_ids"] = KeptIds(**current["kept_ids"])
    return current


def _with_later_columns(episodes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the columns of episodes with those that a checkpoint of an earlier version lacks.

    There every turn advances. The others are read before an update only.
    """
    rewards = episodes["turn_rewards"]
    added = {
        "advances": torch.ones_like(rewards, dtype=torch.bool),
        "success": torch.full(rewards.shape[:1], -1, dtype=torch.int8),
        "final_state": torch.full(rewards.shape[:1], -1, dtype=torch.int64),
        "potential": torch.full(rewards.shape, -torch.inf),
        "final_potential": torch.full(rewards.shape[:1], -torch.inf),
        "terms": rewards.new_zeros(len(rewards), 0, dtype=torch.float64),
        "environment": torch.zeros(rewards.shape[:1], dtype=torch.int64),
    }
    return {**added, **episodes}


def _tensors(part: Samples | Episodes | KeptIds) -> dict[str, Tensor]:
    return {each.name: getattr(part, each.name) for each in fields(part)}


@dataclass(kw_only=True, slots=True)
class Minibatch:
    """Input of one training step. Counts are over all ranks and accumulated steps of the optimizer step."""

    samples: Samples
    images: list[Tensor]
    """RGB images, each uint8 `[height, width, 3]`."""
    reference: Tensor | None
    entropy: float
    """Mean over the trained tokens of the iteration before its update, nats."""
    loss_tokens: Tensor
    """float32 `[]`, tokens in M_loss, by their weights."""
    value_tokens: Tensor
    """float32 `[]`, tokens that the critic learns at."""
    kl_tokens: Tensor
    """float32 `[]`, tokens with a penalty on the divergence from the reference."""
    sequences: Tensor
    """float32 `[]`, samples."""
    episodes: Tensor
    """float32 `[]`, episodes, by the fraction of their tokens in M_loss that is in the optimizer step."""
    episode_tokens: Tensor
    """float32 `[rows]`, tokens of a row's whole episode in M_loss, by their weights."""
    microbatches: list[Tensor]
    """Rows that are computed together, each int64 `[rows]`."""
    ends_step: bool
    """Whether the optimizer takes its step after this minibatch."""
    scale: float
    """Factor of the local sum; with it, what DDP averages is the global mean."""
    kept_ids: KeptIds | None = None
    """Ids that sampling kept at the sampled tokens, row after row; None for all."""
    text_tokens: Tensor = field(default_factory=lambda: torch.ones(()))
    """float32 `[]`, tokens of the environment's text that are predicted."""
    counted: Tensor = field(default_factory=lambda: torch.ones(4, dtype=torch.bool))
    """bool `[4]`, whether the step's loss, value, KL and text tokens are any; a count of none is 1."""
    kl_weight: Tensor | None = None
    """float32 `[tokens]`, weight of the divergence at the sampled tokens, row after row; None for 1 each."""
    reference_ids: Tensor | None = None
    """int32 `[tokens, k]`, see `TrajectoryBatch`, row after row."""

    @property
    def non_padding(self) -> Tensor:
        """Rows that count, bool `[rows, 1]`."""
        return (self.samples.weight > 0)[:, None]

    def state_dict(self) -> dict[str, Any]:
        """Return nested dictionaries of tensors and numbers."""
        state = {each.name: getattr(self, each.name) for each in fields(self)}
        kept_ids = None if self.kept_ids is None else _tensors(self.kept_ids)
        return state | {"samples": _tensors(self.samples), "kept_ids": kept_ids}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the minibatch of a `state_dict`."""
        return cls(**{**_current(state), "samples": _samples(state["samples"])})


@dataclass(frozen=True, slots=True)
class CreditLayout:
    """The credit layout of a batch: the sampled tokens of an episode in one row, whichever samples hold them.

    Built once a batch: it depends on `turn`, `token` and `weight` of the samples only.
    """

    rows: Tensor
    """int64 `[episodes, tokens]`, row of each token in the samples, -1 on padding."""
    columns: Tensor
    """int64 `[episodes, tokens]`, position of each token in its row, -1 on padding."""
    turn: Tensor
    """int64 `[episodes, tokens]`, index of the turn, -1 on padding."""

    @classmethod
    def of(cls, batch: TrajectoryBatch) -> Self:
        """Return the layout of a batch, with one column at least."""
        samples, count = batch.samples, len(batch.episodes.turns)
        rows, columns = samples.sampled.nonzero(as_tuple=True)
        order = torch.argsort(samples.token[rows, columns])
        rows, columns = rows[order], columns[order]
        episode = samples.episode[rows]
        sizes = torch.bincount(episode, minlength=count)
        starts = sizes.cumsum(0) - sizes
        place = torch.arange(len(episode), device=episode.device) - starts[episode]
        shape = (count, max(1, int(sizes.max())) if count else 1)
        padding = torch.full(shape, -1, dtype=torch.int64, device=episode.device)

        def placed(values: Tensor) -> Tensor:
            return padding.index_put((episode, place), values)

        return cls(placed(rows), placed(columns), placed(samples.turn[rows, columns]))

    @property
    def samples(self) -> Tensor:
        """Number of an episode's samples, int64 `[episodes]`."""
        ordered = self.rows.sort(dim=1).values
        ends = (ordered[:, 1:] != ordered[:, :-1]) & (ordered[:, :-1] >= 0)
        return ends.sum(1) + (ordered[:, -1] >= 0)

    @property
    def alternates(self) -> Tensor:
        """Whether an episode's turns go back to a sample after another one, bool `[episodes]`."""
        changes = (self.rows[:, 1:] != self.rows[:, :-1]) & (self.rows[:, 1:] >= 0)
        return changes.sum(1) >= self.samples.clamp(min=1)

    def select(self, episodes: Tensor) -> Self:
        """Return the layout of these episodes."""
        return type(self)(self.rows[episodes], self.columns[episodes], self.turn[episodes])

    def gather(self, values: Tensor, *, fill: float = 0) -> Tensor:
        """Return `[rows, time]` values in this layout, `[episodes, tokens]`, with `fill` on padding."""
        inside = values[self.rows.clamp(min=0), self.columns.clamp(min=0)]
        return torch.where(self.rows >= 0, inside, values.new_full((), fill))

    def scatter(self, values: Tensor, *, like: Tensor) -> Tensor:
        """Return `[episodes, tokens]` values in the shape and type of `like`, `[rows, time]`, 0 elsewhere."""
        token = self.rows >= 0
        result = torch.zeros_like(like)
        result[self.rows[token], self.columns[token]] = values[token].to(like.dtype)
        return result
