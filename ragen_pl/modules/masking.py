"""Masks of an iteration's tokens: trained on (M_loss), carrying credit (M_adv), and penalized for divergence (KL).

All masks are computed in the credit layout, so every layout of samples gives the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from ragen_pl.algorithms.masks import above_quantile, sampled, top_in_turn
from ragen_pl.constraints import PositiveFraction, checked
from ragen_pl.data.batch import CreditLayout, Samples, TrajectoryBatch
from ragen_pl.distributed import gather_over_ranks
from ragen_pl.metrics.importance import ImportanceStatistics
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
    """Shares of each turn's tokens that stay in the masks, by how much they matter for the actions.

    The tokens of the action itself always stay. A turn without an action keeps all its tokens. Scores depend
    on the prompt that the policy read, so layouts with other contexts select other tokens.

    Attributes:
        loss: share kept in M_loss.
        advantage: share kept in M_adv.
    """

    loss: PositiveFraction = 1.0
    advantage: PositiveFraction = 1.0


@checked
@dataclass(kw_only=True)
class Masks:
    """Which sampled tokens are trained on (M_loss) and which carry credit (M_adv).

    Args:
        loss: M_loss; may return weights.
        advantage: M_adv; returns bool.
        top_entropy: share of M_loss's tokens to train on, those of the highest entropy.
        overlong_responses: treatment of responses that hit their length limit.
        observations: label the text shown between responses, which lets masks include it (RICO).
        importance: narrows both masks to the tokens that matter most for the actions; None leaves them.
    """

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

    def write(self, samples: Samples, layout: CreditLayout) -> None:
        """Set the masks of the samples."""
        samples.loss_weight = layout.scatter(self.loss_weight, like=samples.loss_weight)
        samples.loss_mask = samples.loss_weight > 0
        samples.advantage_mask = layout.scatter(self.advantage, like=samples.loss_mask)
        if self.kl is not None:
            samples.kl_mask = layout.scatter(self.kl, like=samples.loss_mask)


def token_masks(
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
    return TokenMasks(
        loss_weight=weight,
        advantage=_require_bool(masks.advantage(spans, turn), "algorithm.masks.advantage"),
        kl=None if kl is None else _require_bool(kl(spans, turn), "algorithm.loss.kl.mask"),
    )


def keep_top_entropy(masks: TokenMasks, entropy: Tensor, *, fraction: float) -> None:
    """Narrow M_loss to its tokens of the highest entropy, counted over all ranks.

    Args:
        masks: Changed in place.
        entropy: `[episodes, tokens]`, of the policy before the update.
        fraction: Share of the tokens to keep.
    """
    if fraction >= 1:
        return
    inside = entropy[masks.loss]
    everywhere = torch.cat([values.to(inside.device) for values in gather_over_ranks(inside)])
    masks.narrow_loss(above_quantile(entropy, masks.loss, fraction=fraction, everywhere=everywhere))


def keep_important(
    masks: TokenMasks,
    scores: Tensor,
    batch: TrajectoryBatch,
    layout: CreditLayout,
    *,
    keep: Importance,
) -> None:
    """Narrow M_loss and M_adv to actions and the tokens that matter most for them.

    Args:
        masks: Changed in place.
        scores: Saliency, `[rows, time]`.
        batch: Trajectories with spans.
        layout: Credit layout of the batch.
        keep: Shares of the tokens to keep.
    """
    turn, score = layout.turn, layout.gather(scores)
    action = layout.gather(batch.samples.spans) == Span.ACTION
    # a rank without episodes has no turns
    turns = batch.episodes.turn_rewards.shape[1]
    actions = torch.zeros(len(action), turns + 1, device=action.device)
    has_action = actions.scatter_add(1, turn + 1, action.float()).gather(1, turn + 1) > 0

    def narrowed(mask: Tensor, share: float) -> Tensor:
        selected = top_in_turn(score, mask & ~action, turn, share=share)
        return mask & torch.where(has_action, selected | action, True)

    masks.advantage = narrowed(masks.advantage, keep.advantage)
    masks.narrow_loss(narrowed(masks.loss, keep.loss))


def record_importance(
    statistics: ImportanceStatistics,
    samples: Samples,
    scores: Tensor,
    *,
    before: Tensor,
    after: Tensor,
    image_token: int | None,
) -> None:
    """Add the scores and the narrowing of M_loss to the statistics, by kind of token.

    Args:
        statistics: Changed in place.
        samples: Samples that were scored.
        scores: Saliency, `[rows, time]`.
        before: M_loss before the narrowing, bool `[rows, time]`.
        after: M_loss after the narrowing, bool `[rows, time]`.
        image_token: Id of an image slot, None for a text model.
    """
    prompt = (samples.turn < 0) & (samples.weight > 0)[:, None]
    image = prompt & (samples.input_ids == (-1 if image_token is None else image_token))
    statistics.add("image", scores, image)
    statistics.add("text", scores, prompt & ~image)
    for number, name in enumerate(("other", "think", "action", "tag", "end", "seen", "predicted")):
        of_span = samples.sampled & (samples.spans == number)
        statistics.add(name, scores, of_span, before=before, after=after)


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
