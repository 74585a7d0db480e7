"""Masks narrowed to the tokens that matter most for the actions, by the scores of `modules.saliency`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragen_pl.algorithms.masks import top_in_turn
from ragen_pl.constraints import PositiveFraction, checked
from ragen_pl.data.batch import (
    Samples,
    TrajectoryBatch,
    credit_layout,
    gather_credit,
    scatter_credit,
)
from ragen_pl.metrics.importance import ImportanceStatistics
from ragen_pl.trajectory import Span


@checked
@dataclass(frozen=True, kw_only=True)
class Importance:
    """Shares of each turn's tokens that stay in the masks, those that matter most for the actions.

    The tokens of the action itself always stay, so that no turn is emptied; a turn without an action keeps all
    it has. Scores depend on what the policy was shown, so that layouts of other contexts select otherwise.

    Attributes:
        loss: share kept in M_loss.
        advantage: share kept in M_adv.
    """

    loss: PositiveFraction = 1.0
    advantage: PositiveFraction = 1.0


def keep_important(
    batch: TrajectoryBatch,
    scores: Tensor,
    settings: Importance,
    *,
    image_token: int | None,
    report: ImportanceStatistics | None = None,
) -> None:
    """Narrow M_loss and M_adv to actions and what mattered most for them.

    Args:
        batch: with masks; changed in place.
        scores: `[rows, time]` of `SaliencyReadout`.
        settings: the shares.
        image_token: id of an image slot, None for a text model.
        report: filled with what was selected.
    """
    credit, rows, columns = credit_layout(batch)
    samples = batch.samples
    score = gather_credit(scores, rows, columns)
    action = gather_credit(samples.spans, rows, columns) == Span.ACTION
    turns = batch.episodes.turn_rewards.shape[1]  # a rank without episodes has none
    acted = torch.zeros(len(action), turns + 1, device=action.device)
    acted = acted.scatter_add(1, credit.turn + 1, action.float()).gather(1, credit.turn + 1) > 0

    def narrowed(mask: Tensor, share: float) -> Tensor:
        chosen = top_in_turn(score, mask & ~action, credit.turn, share=share)
        keep = torch.where(acted, chosen | action, True)
        return mask & keep

    before = samples.loss_mask
    samples.advantage_mask = scatter_credit(
        narrowed(credit.advantage_mask, settings.advantage), rows, columns, like=before
    )
    samples.loss_mask = scatter_credit(
        narrowed(credit.loss_mask, settings.loss), rows, columns, like=before
    )
    samples.loss_weight = torch.where(samples.loss_mask, samples.loss_weight, 0.0)
    if report is not None:
        _fill(report, samples, scores, before, image_token)


def _fill(
    report: ImportanceStatistics,
    samples: Samples,
    scores: Tensor,
    before: Tensor,
    image_token: int | None,
) -> None:
    shown = (samples.turn < 0) & (samples.weight > 0)[:, None]
    image = shown & (samples.input_ids == (-1 if image_token is None else image_token))
    report.add("image", scores, image)
    report.add("text", scores, shown & ~image)
    for number, name in enumerate(("other", "think", "action", "tag", "end", "seen", "predicted")):
        of_span = samples.sampled & (samples.spans == number)
        report.add(name, scores, of_span, before=before, after=samples.loss_mask)


def patch_scores(
    samples: Samples, scores: Tensor, *, image_token: int, patches: int
) -> tuple[Tensor, Tensor]:
    """Average the scores of each patch over all images that all rows show.

    Returns:
        Mean score per patch, `[patches]`, and its mean rank from 0 (least) to 1, `[patches]`.

    Raises:
        ValueError: the rows' image slots are no multiple of `patches`.
    """
    slots = scores[samples.input_ids == image_token]
    if len(slots) % patches:
        raise ValueError(
            f"found {len(slots)} image slots, expected a multiple of {patches}, the patches of an image"
        )
    pixel_values = slots.view(-1, patches)
    ranks = pixel_values.argsort(dim=1).argsort(dim=1).float() / max(1, patches - 1)
    return pixel_values.mean(0), ranks.mean(0)
