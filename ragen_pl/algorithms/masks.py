"""Masks M_loss and M_adv from a label per sampled token (VAGEN's selective token masking).

A mask is a function of the labels and turns of the credit layout. A config names it by its path, with
`_partial_: true`. It returns bool `[trajectories, tokens]` (float where it weighs tokens), nonzero only
where `turn >= 0`.

A turn whose mask would be empty (an action span in a response without an action) keeps all its
sampled tokens unless `fill_empty` is false. Otherwise its reward would have no token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragen_pl.algorithms.turns import following_in_turn, nearest_in_turn
from ragen_pl.algorithms.whitening import AllReduce
from ragen_pl.base.checked import needs_trust
from ragen_pl.trajectory import REASONING_SPANS, Span


@needs_trust()
def sampled(labels: Tensor, turn: Tensor) -> Tensor:
    """Keep every token that the policy sampled, its end-of-turn token included.

    Args:
        labels: int8 `[trajectories, tokens]`, values of `trajectory.Span`.
        turn: int64 `[trajectories, tokens]`, -1 off the sampled tokens.

    >>> sampled(torch.tensor([[1, 2, 0]]), torch.tensor([[0, 0, -1]]))
    tensor([[ True,  True, False]])
    """
    return (turn >= 0) & (labels != Span.SHOWN)


@needs_trust()
def all_text(labels: Tensor, turn: Tensor) -> Tensor:
    """Keep sampled tokens and the text shown between them, without images (RICO's undivided sequence).

    Shown text has labels and turns only where `Masks.observations` is set.

    >>> all_text(torch.tensor([[7, 1, 2, 0]]), torch.tensor([[0, 0, 0, -1]]))
    tensor([[ True,  True,  True, False]])
    """
    return turn >= 0


@needs_trust()
def no_special(labels: Tensor, turn: Tensor, *, fill_empty: bool = True) -> Tensor:
    """Leave out the format's tags and the end-of-turn token.

    >>> no_special(torch.tensor([[3, 1, 3, 2, 4]]), torch.tensor([[0, 0, 0, 0, 0]]))
    tensor([[False,  True, False,  True, False]])
    """
    return _fill_empty_turns((labels != Span.TAG) & (labels != Span.END), labels, turn, fill_empty)


@needs_trust()
def think_weighted(labels: Tensor, turn: Tensor, *, think: float = 0.5) -> Tensor:
    """Give sampled tokens weight 1 and those of the reasoning `think`; for M_loss only.

    >>> think_weighted(torch.tensor([[1, 3, 2, 4]]), torch.tensor([[0, 0, 0, -1]]), think=0.25)
    tensor([[0.2500, 1.0000, 1.0000, 0.0000]])
    """
    if think < 0:
        raise ValueError(f"found think={think}, expected 0 or more; set 0.5")
    thoughts = think_span(labels, turn, fill_empty=False)
    return sampled(labels, turn).float().masked_fill(thoughts, think)


def above_quantile(
    values: Tensor, mask: Tensor, *, fraction: float, all_reduce: AllReduce | None = None
) -> Tensor:
    """Keep the tokens of the mask with the highest values (Wang et al., 2025: a fifth of them, by entropy).

    Args:
        values: `[trajectories, tokens]`, compared as float32.
        mask: Bool `[trajectories, tokens]`.
        fraction: Fraction of the tokens of all ranks to keep; ties with the lowest kept value are kept too.
        all_reduce: Sums a tensor over the ranks; None on one rank.

    >>> row = torch.tensor([[4.0, 1.0, 3.0, 2.0]])
    >>> above_quantile(row, row > 0, fraction=0.5)
    tensor([[ True, False,  True, False]])
    """
    if fraction >= 1:
        return mask
    # of restricted masks only
    from ragen_pl.algorithms.order_statistics import smallest_of_top

    lowest = smallest_of_top(values[mask], fraction=fraction, all_reduce=all_reduce)
    return mask if lowest is None else mask & (values.float() >= lowest)


@needs_trust()
def action_span(labels: Tensor, turn: Tensor, *, fill_empty: bool = True) -> Tensor:
    """Keep the tokens between `<answer>` and `</answer>`, the tags left out.

    >>> action_span(torch.tensor([[1, 3, 2, 4]]), torch.tensor([[0, 0, 0, 0]]))
    tensor([[False, False,  True, False]])
    """
    return _fill_empty_turns(labels == Span.ACTION, labels, turn, fill_empty)


@needs_trust()
def think_span(labels: Tensor, turn: Tensor, *, fill_empty: bool = True) -> Tensor:
    """Keep the tokens between `<think>` and `</think>`, the tags left out.

    >>> think_span(torch.tensor([[1, 3, 2, 4]]), torch.tensor([[0, 0, 0, 0]]))
    tensor([[ True, False, False, False]])
    """
    thoughts = torch.isin(labels, labels.new_tensor(REASONING_SPANS))
    return _fill_empty_turns(thoughts, labels, turn, fill_empty)


@needs_trust()
def all_but_action(labels: Tensor, turn: Tensor, *, fill_empty: bool = True) -> Tensor:
    """Keep all sampled tokens outside the action.

    >>> all_but_action(torch.tensor([[1, 3, 2, 4]]), torch.tensor([[0, 0, 0, 0]]))
    tensor([[ True,  True, False,  True]])
    """
    return _fill_empty_turns(labels != Span.ACTION, labels, turn, fill_empty)


@needs_trust()
def until_action(labels: Tensor, turn: Tensor, *, fill_empty: bool = True) -> Tensor:
    """Keep a turn's sampled tokens up to and including the last of its action.

    >>> until_action(torch.tensor([[1, 3, 2, 4]]), torch.tensor([[0, 0, 0, 0]]))
    tensor([[ True,  True,  True, False]])
    """
    return _fill_empty_turns(
        following_in_turn(labels == Span.ACTION, turn=turn) >= 0, labels, turn, fill_empty
    )


def top_in_turn(scores: Tensor, mask: Tensor, turn: Tensor, *, fraction: float) -> Tensor:
    """Keep the fraction of each turn's tokens inside the mask that score highest, one at least.

    Of a turn's n tokens, `ceil(fraction n)` are kept. Ties go to the earlier token.

    Args:
        scores: `[trajectories, tokens]`.
        mask: Bool `[trajectories, tokens]`, the tokens to choose from.
        turn: int64 `[trajectories, tokens]`, -1 off the sampled tokens.
        fraction: From 0 to 1; 1 keeps all.

    Returns:
        bool `[trajectories, tokens]`.

    >>> scores = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    >>> top_in_turn(scores, scores >= 0, torch.tensor([[0, 0, 0, 1]]), fraction=0.5)
    tensor([[False,  True,  True,  True]])
    """
    if fraction >= 1 or not scores.numel():
        return mask.clone()
    # tokens outside the mask form one group before all turns
    group = torch.where(mask, turn, -1)
    by_score = torch.argsort(scores, dim=1, descending=True, stable=True)
    order = by_score.gather(1, torch.argsort(group.gather(1, by_score), dim=1, stable=True))
    ordered = group.gather(1, order)
    place = torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    first = ordered != torch.cat([torch.full_like(ordered[:, :1], -2), ordered[:, :-1]], dim=1)
    rank = place - torch.where(first, place, 0).cummax(dim=1).values
    sizes = torch.zeros(len(scores), int(group.max()) + 2, device=scores.device)
    sizes = sizes.scatter_add(1, ordered + 1, torch.ones_like(ordered, dtype=sizes.dtype))
    # in float64, since 0.1 * 10 must not exceed 1
    limit = (sizes.double() * fraction - 1e-9).ceil().clamp(min=1).gather(1, ordered + 1)
    keep = torch.zeros_like(mask).scatter(1, order, rank < limit)
    return keep & mask


def filled(mask: Tensor, labels: Tensor, turn: Tensor) -> Tensor:
    """Add all sampled tokens of the turns that have none in a mask."""
    has_any = nearest_in_turn(mask, turn=turn) >= 0
    return mask | (~has_any & sampled(labels, turn))


def _fill_empty_turns(keep: Tensor, labels: Tensor, turn: Tensor, fill_empty: bool) -> Tensor:
    keep = keep & sampled(labels, turn)
    return filled(keep, labels, turn) if fill_empty else keep
