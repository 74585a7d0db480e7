"""Masks of an iteration's tokens: trained on (M_loss), carrying credit (M_adv), and penalized for divergence (KL).

All masks are computed in the credit layout, so every layout of samples gives the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor

from ragen_pl.algorithms.masks import above_quantile, filled, sampled
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import PositiveFraction
from ragen_pl.base.distributed import sum_over_ranks
from ragen_pl.base.run_facts import RunFacts
from ragen_pl.data.batch import CreditLayout, Samples, TrajectoryBatch
from ragen_pl.trajectory import Span

Mask = Callable[[Tensor, Tensor], Tensor]
"""(spans, turn index), both `[episodes, tokens]` → bool or, for M_loss, a weight `[episodes, tokens]`."""


class OverlongResponses(StrEnum):
    """Treatment of responses that hit their length limit: `mask` leaves them out of M_loss only."""

    KEEP = "keep"
    MASK = "mask"


@checked
@dataclass(frozen=True, kw_only=True)
class Importance:
    """Fractions of each turn's tokens that stay in the masks, by how much they matter for the actions.

    The tokens of the action itself always stay. A turn without an action keeps all its tokens. Scores depend
    on the prompt that the policy read, so layouts with other contexts select other tokens.

    Attributes:
        loss: Fraction kept in M_loss.
        advantage: Fraction kept in M_adv.
    """

    needs_trust = ()

    loss: PositiveFraction = 1.0
    advantage: PositiveFraction = 1.0


@checked
@dataclass(kw_only=True)
class Masks:
    """Masks of the sampled tokens: those that are trained on (M_loss) and those that carry credit (M_adv).

    Args:
        loss: M_loss; may return weights.
        advantage: M_adv; returns bool.
        top_entropy: Fraction of M_loss's tokens to train on, those of the highest entropy.
        overlong_responses: Treatment of responses that hit their length limit.
        observations: Label the text shown between responses, which lets masks include it (RICO).
        importance: Narrows both masks to the tokens that matter most for the actions; None leaves them.
    """

    needs_trust = ()

    loss: Mask = sampled
    advantage: Mask = sampled
    top_entropy: PositiveFraction = 1.0
    overlong_responses: OverlongResponses = OverlongResponses.KEEP
    observations: bool = False
    importance: Importance | None = None

    def __post_init__(self) -> None:
        if self.importance is not None and self.observations:
            raise ValueError(
                "algorithm.masks.importance: scores choose among sampled tokens, and observations=true trains on "
                "text that was shown; set one of them off"
            )
        if _weights(self.advantage).dtype != torch.bool:
            raise ValueError(
                f"algorithm.masks.advantage={_name(self.advantage)}: a token is a step of credit or is not, it "
                "cannot be part of one; set weights in algorithm.masks.loss"
            )
        shown = [mask for mask in (self.loss, self.advantage) if _weight(mask, Span.SHOWN)]
        if self.observations and not shown:
            raise ValueError(
                "algorithm.masks.observations=true: neither mask holds text that was shown; set "
                "algorithm.masks.loss._target_=ragen_pl.algorithms.masks.all_text, or observations=false"
            )
        if shown and not self.observations:
            raise ValueError(
                f"algorithm.masks.observations=false: {_name(shown[0])} would hold sampled tokens only; set "
                "algorithm.masks.observations=true"
            )

    def check_run(self, facts: RunFacts) -> None:
        """Check the masks against the context and the form of responses."""
        if self.observations and facts.window != "all":
            raise ValueError(
                f"context.window={facts.window}: masks over text that was shown need the trajectory as one "
                "undivided sequence, else a text is trained on once for each turn that shows it; "
                "set context.window=all"
            )
        if self.observations and facts.hinted:
            raise ValueError(
                "algorithm.loss.kl.hint with algorithm.masks.observations=true: the teacher reads other texts than the "
                "policy, and has no distribution at those that are shown; set algorithm.masks.observations=false, or "
                "algorithm.loss.kl.hint=null"
            )
        if self.observations and facts.left_out_turns:
            raise ValueError(
                f"context.leave_out.turns={facts.left_out_turns}: algorithm.masks.observations=true trains on the "
                "trajectory as one undivided sequence; set turns=0"
            )
        for key, mask in (("loss", self.loss), ("advantage", self.advantage)):
            singles_out_thoughts = _weight(mask, Span.THINK) != _weight(mask, Span.OTHER)
            if singles_out_thoughts and "think" not in facts.blocks:
                raise ValueError(
                    f"algorithm.masks.{key}={_name(mask)}: env.prompt_format={facts.prompt_format} has no "
                    "reasoning; set another mask"
                )


# a turn with a token of each kind
_LABELS = (Span.SHOWN, Span.THINK, Span.OTHER, Span.ACTION, Span.END)


def _weights(mask: Mask) -> Tensor:
    return mask(torch.tensor([_LABELS]), torch.zeros(1, len(_LABELS), dtype=torch.int64))


def _weight(mask: Mask, label: Span) -> float:
    """Return a mask's weight for a label, among tokens of other labels."""
    return float(_weights(mask)[0, _LABELS.index(label)])


def _name(mask: Mask) -> str:
    function = mask.func if isinstance(mask, partial) else mask
    return str(getattr(function, "__name__", type(function).__name__))


@dataclass(slots=True)
class TokenMasks:
    """Masks of a batch in the credit layout."""

    loss_weight: Tensor
    """float32 `[episodes, tokens]`, above 0 inside M_loss."""
    advantage: Tensor
    """bool `[episodes, tokens]`, M_adv."""
    kl: Tensor | None
    """bool `[episodes, tokens]`, None without a reference."""

    @property
    def loss(self) -> Tensor:
        """M_loss, bool `[episodes, tokens]`."""
        return self.loss_weight > 0

    def narrow_loss(self, mask: Tensor) -> None:
        """Leave tokens outside the mask out of M_loss."""
        self.loss_weight = torch.where(mask, self.loss_weight, 0.0)

    def select(self, episodes: Tensor) -> TokenMasks:
        """Return the masks of these episodes."""
        kl = None if self.kl is None else self.kl[episodes]
        return TokenMasks(self.loss_weight[episodes], self.advantage[episodes], kl)

    def write(self, samples: Samples, layout: CreditLayout) -> None:
        """Set the masks of the samples."""
        samples.loss_weight = layout.scatter(self.loss_weight, like=samples.loss_weight)
        samples.loss_mask = samples.loss_weight > 0
        samples.advantage_mask = layout.scatter(self.advantage, like=samples.loss_mask)
        if self.kl is not None:
            samples.kl_mask = layout.scatter(self.kl, like=samples.loss_mask)


def compute_token_masks(
    batch: TrajectoryBatch, layout: CreditLayout, masks: Masks, *, kl: Mask | None
) -> TokenMasks:
    """Compute the loss, advantage and KL masks from the spans of the tokens.

    Args:
        batch: Trajectories with spans.
        layout: Credit layout of the batch.
        masks: M_loss and M_adv.
        kl: KL mask, None without a reference.

    Raises:
        ValueError: M_adv or the KL mask returns weights instead of bool.
    """
    spans, turn = layout.gather(batch.samples.spans), layout.turn
    weight = masks.loss(spans, turn).float()
    if masks.overlong_responses is OverlongResponses.MASK:
        weight = torch.where(_of_turn(batch.episodes.hit_length_limit, turn), 0.0, weight)
    advantage = _require_bool(masks.advantage(spans, turn), "algorithm.masks.advantage")
    return TokenMasks(
        loss_weight=weight,
        # else a turn's reward would have no token
        advantage=filled(advantage, spans, turn),
        kl=None if kl is None else _require_bool(kl(spans, turn), "algorithm.loss.kl.mask"),
    )


def keep_top_entropy(masks: TokenMasks, entropy: Tensor, *, fraction: float) -> None:
    """Narrow M_loss to its tokens of the highest entropy, counted over all ranks.

    Args:
        masks: Changed in place.
        entropy: `[episodes, tokens]`, of the policy before the update.
        fraction: Fraction of the tokens to keep.
    """
    if fraction < 1:
        masks.narrow_loss(
            above_quantile(entropy, masks.loss, fraction=fraction, all_reduce=sum_over_ranks)
        )


def _of_turn(values: Tensor, turn: Tensor) -> Tensor:
    """Return the value of each token's turn, bool `[episodes, tokens]`; False off the sampled tokens."""
    if not values.shape[1]:
        return torch.zeros_like(turn, dtype=torch.bool)
    return values.gather(1, turn.clamp(min=0)) & (turn >= 0)


def _require_bool(mask: Tensor, key: str) -> Tensor:
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{key}: found weights, expected a mask, for a token is a step of credit or is not; "
            "weights belong into algorithm.masks.loss"
        )
    return mask
