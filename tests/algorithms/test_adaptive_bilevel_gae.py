"""Discounts from the progress of the episode."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_pl.algorithms.advantages.adaptive import AdaptiveBilevelGAE, turn_progress
from ragen_pl.algorithms.advantages.bilevel import BilevelGAE
from ragen_pl.algorithms.credit import AdvantageInputs


def credit(seed: int = 0, rows: int = 4, turns: int = 5) -> AdvantageInputs:
    """Turns of three tokens, some tokens without credit, random values and turn rewards."""
    draw = torch.Generator().manual_seed(seed)
    turn = torch.arange(turns).repeat_interleave(3).repeat(rows, 1)
    turn[0, -4:] = -1
    mask = (turn >= 0) & (torch.arange(3 * turns) % 3 != 2)
    values = torch.randn(rows, 3 * turns, generator=draw)
    rewards = torch.zeros_like(values)
    rewards[:, 1::3] = torch.randn(rows, turns, generator=draw) * mask[:, 1::3]
    return AdvantageInputs(
        rewards=rewards, values=values, advantage_mask=mask, loss_mask=turn >= 0, turn=turn,
        group=torch.arange(rows), bootstrap=torch.randn(rows, generator=draw),
        returns=rewards.sum(1),
    )  # fmt: skip


@given(
    seed=st.integers(0, 1000), gamma=st.floats(0.5, 1), lam=st.floats(0, 1), token=st.floats(0.5, 1)
)
@settings(max_examples=30)
def test_beta_zero_equals_bilevel_gae_bit_for_bit(seed, gamma, lam, token) -> None:
    given = credit(seed)
    same = {"gamma_turn": gamma, "lam_turn": lam, "gamma_token": token, "lam_token": lam}
    ours = AdaptiveBilevelGAE(beta=0.0, low=0.0, high=1.0, **same)(given)
    plain = BilevelGAE(**same)(given)
    assert torch.equal(ours.advantages, plain.advantages)
    assert torch.equal(ours.returns, plain.returns)


def test_adaptive_gae_by_hand_on_three_turns() -> None:
    # one token a turn, V = 0.5 0.75 0.25, r = 0 0.5 1; window 1, feedback 1:
    # progress = 0, 0.25 + 0, -0.5 + 0.5 → gamma = 0.9, 0.9 + 0.2 * 0.25 = 0.95, 0.9
    everywhere = torch.ones(1, 3, dtype=torch.bool)
    given = AdvantageInputs(
        rewards=torch.tensor([[0.0, 0.5, 1.0]]), values=torch.tensor([[0.5, 0.75, 0.25]]),
        advantage_mask=everywhere, loss_mask=everywhere, turn=torch.tensor([[0, 1, 2]]),
        group=torch.zeros(1, dtype=torch.int64), bootstrap=torch.tensor([2.0]),
        returns=torch.tensor([1.5]),
    )  # fmt: skip
    estimator = AdaptiveBilevelGAE(gamma_turn=0.9, beta=0.2, low=0.5, high=1.0, window=1)
    assert estimator.discounts(given)[0].tolist() == pytest.approx([0.9, 0.95, 0.9])
    last = 1.0 + 0.9 * 2.0 - 0.25
    second = 0.5 + 0.95 * 0.25 - 0.75 + 0.95 * last
    first = 0.0 + 0.9 * 0.75 - 0.5 + 0.9 * second
    advantages = estimator(given).advantages[0].tolist()
    assert advantages == pytest.approx([first, second, last], abs=1e-6)


def test_progress_is_averaged_over_the_window() -> None:
    values = torch.tensor([[0.0, 1.0, 3.0, 6.0, 6.0]])
    turn = torch.tensor([[0, 1, 2, 4, -1]])  # turn 3 has no token
    progress = turn_progress(torch.zeros(1, 5), values, turn, window=2, feedback=1.0)
    assert progress.tolist() == [[0.0, 1.0, 1.5, 2.5, 0.0]]


def test_discount_does_not_depend_on_later_turns() -> None:
    given, changed = credit(), credit()
    later = given.turn >= 3
    changed.values = torch.where(later, 9.0, given.values)
    changed.rewards = torch.where(later & (given.rewards != 0), 5.0, given.rewards)
    here = torch.where(given.turn == 2, 7.0, given.rewards)  # earned by turn 2: known after it
    changed.rewards = torch.where(given.rewards != 0, here, changed.rewards)
    estimator = AdaptiveBilevelGAE(beta=0.3, low=0.0, high=1.0)
    before, after = estimator.discounts(given), estimator.discounts(changed)
    assert torch.equal(before[given.turn < 3], after[given.turn < 3])
    assert not torch.equal(before, after)


def test_discounts_rise_after_success_and_stay_inside_their_bounds() -> None:
    values = torch.tensor([[0.0, 1.0, 0.0, 50.0]])
    everywhere = torch.ones_like(values, dtype=torch.bool)
    given = AdvantageInputs(
        rewards=torch.zeros_like(values), values=values, advantage_mask=everywhere, loss_mask=everywhere,
        turn=torch.tensor([[0, 1, 2, 3]]), group=torch.zeros(1, dtype=torch.int64),
        bootstrap=torch.zeros(1), returns=torch.zeros(1),
    )  # fmt: skip
    first, rise, fall, high = AdaptiveBilevelGAE(window=1, beta=0.03).discounts(given)[0].tolist()
    assert fall < first < rise < high == 0.99


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"low": 0.97}, "gamma_turn"), ({"high": 1.5}, "high"), ({"window": 0}, "window")],
)
def test_wrong_settings_are_rejected(wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveBilevelGAE(**wrong)
