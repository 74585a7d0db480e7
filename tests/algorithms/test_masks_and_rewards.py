"""Masks from labels, rewards on tokens: no mask may swallow a reward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_pl.algorithms import masks
from ragen_pl.algorithms.credit import carry_into_mask, place_turn_rewards

maths = settings(max_examples=80, database=None, derandomize=True)
MASKS = [
    masks.sampled,
    masks.action_span,
    masks.think_span,
    masks.all_but_action,
    masks.until_action,
]

# <think> a </think> <answer> Up || </answer> end   |   gibberish end   |   padding
LABELS = torch.tensor([[3, 1, 3, 3, 2, 2, 3, 4, 0, 4, 0]], dtype=torch.int8)
TURN = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 0, 1, 1, -1]])


def on(mask: torch.Tensor) -> list[int]:
    return mask[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("mask", "first_turn"),
    [
        (masks.sampled, [0, 1, 2, 3, 4, 5, 6, 7]),
        (masks.action_span, [4, 5]),
        (masks.think_span, [1]),
        (masks.all_but_action, [0, 1, 2, 3, 6, 7]),
        (masks.until_action, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_masks_by_hand(mask, first_turn) -> None:
    """The second turn has neither thought nor action and keeps all its tokens."""
    assert on(mask(LABELS, TURN)) == [*first_turn, 8, 9]


def test_empty_turn_stays_empty_without_fill_empty() -> None:
    assert on(masks.action_span(LABELS, TURN, fill_empty=False)) == [4, 5]
    assert on(masks.until_action(LABELS, TURN, fill_empty=False)) == [0, 1, 2, 3, 4, 5]


def test_until_action_stays_within_its_turn() -> None:
    labels, turn = torch.tensor([[1, 4, 2, 4]]), torch.tensor([[0, 0, 1, 1]])
    assert on(masks.until_action(labels, turn, fill_empty=False)) == [2]


@st.composite
def responses(draw):
    turn, rows = [], draw(st.integers(1, 3))
    for _ in range(rows):
        line = sorted(draw(st.lists(st.integers(0, 3), max_size=8)))
        turn.append(line + [-1] * (8 - len(line)))
    table = st.lists(st.integers(0, 4), min_size=8 * rows, max_size=8 * rows)
    labels = torch.tensor(draw(table), dtype=torch.int8).reshape(rows, 8)
    return labels, torch.tensor(turn)


@pytest.mark.parametrize("mask", MASKS)
@maths
@given(batch=responses())
def test_every_turn_keeps_its_reward(mask, batch) -> None:
    labels, turn = batch
    kept = mask(labels, turn)
    assert not (kept & (turn < 0)).any()
    rewards = torch.zeros(len(turn), 4)
    for row, line in enumerate(turn.tolist()):
        for k in set(line) - {-1}:
            rewards[row, k] = k + 1.0
    placed = place_turn_rewards(rewards, turn, kept)
    assert torch.equal(placed.sum(1), rewards.sum(1))
    assert not placed[~kept].any()


def test_rewards_sit_on_the_last_token_of_the_mask() -> None:
    kept = masks.action_span(LABELS, TURN)
    placed = place_turn_rewards(torch.tensor([[0.5, -0.1, 0.0]]), TURN, kept)
    assert placed.nonzero().tolist() == [[0, 5], [0, 9]]
    assert placed[0, [5, 9]].tolist() == pytest.approx([0.5, -0.1])


def test_reward_of_a_turn_outside_the_mask_is_an_error() -> None:
    kept = masks.action_span(LABELS, TURN, fill_empty=False)
    with pytest.raises(ValueError, match=r"found reward -0.1 in turn 1 of trajectory 0"):
        place_turn_rewards(torch.tensor([[0.5, -0.1]]), TURN, kept)
    with pytest.raises(ValueError, match="found turn index 1"):
        place_turn_rewards(torch.tensor([[0.5]]), TURN, kept)


def test_penalty_of_a_token_outside_the_mask_moves_inside() -> None:
    values = torch.tensor([[1.0, 2.0, 0.0, 4.0, 8.0, 16.0]])
    inside = torch.tensor([[False, True, False, True, False, False]])
    carried = carry_into_mask(values, inside, torch.tensor([[0, 0, -1, 1, 1, 1]]))
    assert carried.tolist() == [[0.0, 3.0, 0.0, 28.0, 0.0, 0.0]]


def test_masks_without_special_tokens_and_with_weights() -> None:
    labels, turn = torch.tensor([[1, 3, 2, 4, 7]]), torch.zeros(1, 5, dtype=torch.int64)
    assert masks.sampled(labels, turn).tolist() == [[True, True, True, True, False]]
    assert masks.no_special(labels, turn).tolist() == [[True, False, True, False, False]]
    assert masks.think_weighted(labels, turn, think=0.5).tolist() == [[0.5, 1.0, 1.0, 1.0, 0.0]]
