"""Which tokens of an iteration are trained on, carry credit, and are held to the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from ragen_pl.algorithms.masks import above_quantile
from ragen_pl.data.batch import TrajectoryBatch, credit_layout, gather_credit, scatter_credit
from ragen_pl.distributed import gather_over_ranks
from ragen_pl.modules.losses import Mask, Masks, OverlongResponses


def apply_masks(batch: TrajectoryBatch, masks: Masks, *, kl: Mask | None) -> None:
    """Set the samples' loss, advantage and KL masks from the spans of their tokens.

    Masks are functions of an episode's tokens in order, so that every layout gives the same ones.

    Raises:
        ValueError: M_adv or the KL mask gives weights other than 0 and 1.
    """
    credit, rows, columns = credit_layout(batch)
    samples = batch.samples
    spans = gather_credit(samples.spans, rows, columns)
    weight = masks.loss(spans, credit.turn).float()
    if masks.overlong_responses is OverlongResponses.MASK:
        weight = torch.where(_of_token(batch.episodes.hit_length_limit, credit.turn), 0.0, weight)
    samples.loss_weight = scatter_credit(weight, rows, columns, like=samples.loss_weight)
    samples.loss_mask = samples.loss_weight > 0
    advantage = _whole(masks.advantage(spans, credit.turn), "advantage")
    samples.advantage_mask = scatter_credit(advantage, rows, columns, like=samples.loss_mask)
    if kl is not None:
        held = _whole(kl(spans, credit.turn), "kl")
        samples.kl_mask = scatter_credit(held, rows, columns, like=samples.loss_mask)


def keep_top_entropy(batch: TrajectoryBatch, entropy: Tensor, *, fraction: float) -> None:
    """Narrow M_loss to its tokens of the highest entropy, counted over all ranks.

    Args:
        batch: with masks; changed in place.
        entropy: `[rows, time]` of the policy before the update.
        fraction: share of the tokens to keep.
    """
    if fraction >= 1:
        return
    samples = batch.samples
    inside = entropy[samples.loss_mask]
    everywhere = torch.cat([part.to(inside.device) for part in gather_over_ranks(inside)])
    mask = above_quantile(entropy, samples.loss_mask, fraction=fraction, everywhere=everywhere)
    samples.loss_mask = mask
    samples.loss_weight = torch.where(mask, samples.loss_weight, 0.0)


def _of_token(of_turn: Tensor, turn: Tensor) -> Tensor:
    """Give every token its turn's mark, False off the sampled tokens."""
    if not of_turn.shape[1]:
        return torch.zeros_like(turn, dtype=torch.bool)
    return of_turn.gather(1, turn.clamp(min=0)) & (turn >= 0)


def _whole(mask: Tensor, name: str) -> Tensor:
    if mask.dtype != torch.bool:
        raise ValueError(
            f"algorithm.masks.{name}: found weights, expected a mask, for a token is a step of credit or is not; "
            "weights belong into algorithm.masks.loss"
        )
    return mask
