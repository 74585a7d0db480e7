"""From a label per sampled token to the masks M_loss and M_adv (VAGEN's selective token masking).

Every function takes the credit layout and returns bool `[trajectories, tokens]` (float where it
weighs tokens), nonzero only where `turn >= 0`. In a config a mask is a function named by its path,
with `_partial_: true`.

A turn whose mask would be empty (an action span in a response without an action) keeps all its
sampled tokens unless `fill_empty` is false, so that its reward has a token to sit on.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from ragen_pl.algorithms.turns import following_in_turn, nearest_in_turn

# The values of trajectory.Span, written out because this layer imports torch alone.
OTHER: Final = 0
THINK: Final = 1
ACTION: Final = 2
TAG: Final = 3
END: Final = 4
OBSERVATION: Final = 5
PREDICTION: Final = 6
SHOWN: Final = (
    7  # not sampled: text that the policy was shown, labelled only where RICO asks for it
)


def sampled(labels: Tensor, turn: Tensor) -> Tensor:
    """Keep every token the policy sampled, its end-of-turn token included.

    Args:
        labels: int8 `[trajectories, tokens]`, values of `trajectory.Span`.
        turn: int64 `[trajectories, tokens]`, -1 off the sampled tokens.

    >>> import torch
    >>> sampled(torch.tensor([[1, 2, 0]]), torch.tensor([[0, 0, -1]]))
    tensor([[ True,  True, False]])
    """
    return (turn >= 0) & (labels != SHOWN)


def all_text(labels: Tensor, turn: Tensor) -> Tensor:
    """Keep what was sampled and the text shown between, images left out (RICO's undivided sequence).

    Text that was shown is labelled only where `Masks.observations` is set.

    >>> import torch
    >>> all_text(torch.tensor([[7, 1, 2, 0]]), torch.tensor([[0, 0, 0, -1]]))
    tensor([[ True,  True,  True, False]])
    """
    return turn >= 0


def no_special(labels: Tensor, turn: Tensor, *, fill_empty: bool = True) -> Tensor:
    """Leave out the format's tags and the end-of-turn token.

    >>> import torch
    >>> no_special(torch.tensor([[3, 1, 3, 2, 4]]), torch.tensor([[0, 0, 0, 0, 0]]))
    tensor([[False,  True, False,  True, False]])
    """
    return _finish((labels != TAG) & (labels != END), labels, turn, fill_empty)


def think_weighted(labels: Tensor, turn: Tensor, *, think: float = 0.5) -> Tensor:
    """Weigh sampled tokens 1 and those of the reasoning `think`: for M_loss, where weights may be real.

    >>> import torch
    >>> think_weighted(torch.tensor([[1, 3, 2, 4]]), torch.tensor([[0, 0, 0, -1]]), think=0.25)
    tensor([[0.2500, 1.0000, 1.0000, 0.0000]])
    """
    if think < 0:
        raise ValueError(f"found think={think}, expected 0 or more; set 0.5")
    thoughts = think_span(labels, turn, fill_empty=False)
    return sampled(labels, turn).float().masked_fill(thoughts, think)


def above_quantile(values: Tensor, mask: Tensor, *, fraction: float, everywhere: Tensor) -> Tensor:
    """Keep the fraction of the mask's tokens with the highest values (Wang et al., 2025: a fifth, by entropy).

    Args:
        values: `[trajectories, tokens]`.
        mask: bool `[trajectories, tokens]`.
        fraction: of the tokens to keep, those as high as the lowest kept included.
        everywhere: `[tokens]`: the values inside the masks of all ranks.

    >>> import torch
    >>> row = torch.tensor([[4.0, 1.0, 3.0, 2.0]])
    >>> above_quantile(row, row > 0, fraction=0.5, everywhere=row[0])
    tensor([[ True, False,  True, False]])
    """
    count = max(1, round(fraction * len(everywhere)))
    if fraction >= 1 or not len(everywhere):
        return mask
    return mask & (values >= everywhere.topk(count).values[-1])


def action_span(labels: Tensor, turn: Tensor, *, fill_empty: bool = True) -> Tensor:
    """Keep the tokens between `<answer>` and `</answer>`, the tags left out.

    >>> import torch
    >>> action_span(torch.tensor([[1, 3, 2, 4]]), torch.tensor([[0, 0, 0, 0]]))
    tensor([[False, False,  True, False]])
    """
    return _finish(labels == ACTION, labels, turn, fill_empty)


def think_span(labels: Tensor, turn: Tensor, *, fill_empty: bool = True) -> Tensor:
    """Keep the tokens between `<think>` and `</think>`, the tags left out.

    >>> import torch
    >>> think_span(torch.tensor([[1, 3, 2, 4]]), torch.tensor([[0, 0, 0, 0]]))
    tensor([[ True, False, False, False]])
    """
    thoughts = (labels == THINK) | (labels == OBSERVATION) | (labels == PREDICTION)
    return _finish(thoughts, labels, turn, fill_empty)


def all_but_action(labels: Tensor, turn: Tensor, *, fill_empty: bool = True) -> Tensor:
    """Keep all sampled tokens outside the action.

    >>> import torch
    >>> all_but_action(torch.tensor([[1, 3, 2, 4]]), torch.tensor([[0, 0, 0, 0]]))
    tensor([[ True,  True, False,  True]])
    """
    return _finish(labels != ACTION, labels, turn, fill_empty)


def until_action(labels: Tensor, turn: Tensor, *, fill_empty: bool = True) -> Tensor:
    """Keep a turn's sampled tokens up to and including the last of its action.

    >>> import torch
    >>> until_action(torch.tensor([[1, 3, 2, 4]]), torch.tensor([[0, 0, 0, 0]]))
    tensor([[ True,  True,  True, False]])
    """
    return _finish(following_in_turn(labels == ACTION, turn=turn) >= 0, labels, turn, fill_empty)


def _finish(keep: Tensor, labels: Tensor, turn: Tensor, fill_empty: bool) -> Tensor:
    on = sampled(labels, turn)
    keep = keep & on
    if not fill_empty:
        return keep
    has_any = nearest_in_turn(keep, turn=turn) >= 0
    return keep | (~has_any & on)
