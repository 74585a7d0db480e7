"""Parts of the family by hand: GiGPO, GSPO, CISPO, mismatch, normalizers, references, entropy target, shaping."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_pl.algorithms.advantages.gigpo import gigpo
from ragen_pl.algorithms.credit import carry_into_mask
from ragen_pl.algorithms.masks import no_special, sampled, think_weighted
from ragen_pl.algorithms.mismatch import Level, MaskedWeights, TruncatedWeights, importance_ratio
from ragen_pl.algorithms.normalization import ByBatch, ByGroup, RewardNormalizer, Running, Schedule
from ragen_pl.algorithms.policy_loss import clipped_surrogate
from ragen_pl.algorithms.ratio_losses import cispo, sequence_surrogate
from ragen_pl.models.build import build_small_lm
from ragen_pl.modules.losses import UpdateLoss
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.reference import AdaptersOff, FrozenCopy, MovingAverage

TURN = torch.tensor([[0, 0, -1, 1, 1, 1]])
MASK = TURN >= 0


def test_gigpo_compares_turns_that_began_in_the_same_state() -> None:
    """Two episodes: both begin in state 0; one meets state 5 twice, the other state 5 once and state 9."""
    rewards = torch.tensor([[0.0, 0.0, 2.0], [0.0, 1.0, 0.0]])
    state = torch.tensor([[0, 5, 5], [0, 5, 9]])
    group = torch.tensor([0, 0])
    step = {"gamma": 0.5, "scale_by_std": False}
    found = gigpo(rewards.sum(1), group, rewards, state, step_weight=1.0, **step)
    # returns from each turn on: 0.5 1 2 and 0.5 1 0; state 0: mean 0.5; state 5: 1 2 1, mean 4/3
    expected = torch.tensor([[0.5, 0.5 - 1 / 3, 0.5 + 2 / 3], [-0.5, -0.5 - 1 / 3, -0.5]])
    torch.testing.assert_close(found, expected)
    apart = gigpo(rewards.sum(1), torch.tensor([0, 1]), rewards, state, step_weight=1.0, **step)
    torch.testing.assert_close(apart, torch.tensor([[0.0, -0.5, 0.5], [0.0, 0.0, 0.0]]))
    without = gigpo(rewards.sum(1), group, rewards, state, step_weight=0.0, **step)
    torch.testing.assert_close(without, torch.tensor([[0.5] * 3, [-0.5] * 3]))


def test_one_ratio_for_a_response() -> None:
    """Each response's ratio is the geometric mean; its gradient is A s (1 / n) a token under a mean."""
    logprobs = torch.tensor([[0.1, 0.3, 7.0, 0.0, 0.0, 0.6]], requires_grad=True)
    found = sequence_surrogate(
        logprobs, torch.zeros(1, 6), torch.ones(1, 6), MASK, TURN, clip_low=0.5, clip_high=0.5
    )
    ratios = torch.tensor([[0.2, 0.2, 0.0, 0.2, 0.2, 0.2]]).exp() * MASK
    torch.testing.assert_close(found.losses, -ratios)
    found.losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, -ratios)
    held = sequence_surrogate(
        logprobs.detach(), torch.zeros(1, 6), torch.ones(1, 6), MASK, TURN, clip_low=0.1, clip_high=0.1
    )  # fmt: skip
    assert int(held.clipped_high) == 5 and held.losses[0, 0] == pytest.approx(-1.1)


def test_a_clipped_weight_lets_every_token_learn() -> None:
    logprobs = torch.tensor([[1.0, 0.2, 0.0, -3.0, 0.0, 0.0]], requires_grad=True)
    found = cispo(logprobs, torch.zeros(1, 6), torch.ones(1, 6), MASK, clip_low=0.5, clip_high=0.5)
    found.losses.sum().backward()
    expected = -torch.tensor([[1.5, 0.2, 0.0, 0.5, 1.0, 1.0]])
    expected[0, 1] = -torch.tensor(0.2).exp()
    torch.testing.assert_close(logprobs.grad, expected * MASK)
    ppo = clipped_surrogate(
        logprobs, torch.zeros(1, 6), torch.ones(1, 6), MASK, clip_low=0.5, clip_high=0.5
    )
    [gradient] = torch.autograd.grad(ppo.losses.sum(), logprobs)
    assert gradient[0, 0] == 0 and logprobs.grad[0, 0] != 0


def test_importance_weights_of_tokens_and_responses() -> None:
    trainer = torch.tensor([[0.5, 0.2, 9.0, 0.0, 0.0, -1.0]])
    token = importance_ratio(trainer, torch.zeros(1, 6), TURN, level=Level.TOKEN)
    torch.testing.assert_close(token[MASK], trainer[MASK].exp())
    response = importance_ratio(trainer, torch.zeros(1, 6), TURN, level=Level.SEQUENCE)
    expected = torch.tensor([0.7, 0.7, -1.0, -1.0, -1.0]).exp()
    torch.testing.assert_close(response[MASK], expected)
    cut = TruncatedWeights(cap=1.1)(trainer, torch.zeros(1, 6), TURN)
    torch.testing.assert_close(cut[MASK], trainer[MASK].exp().clamp(max=1.1))
    kept = MaskedWeights(low=0.5, high=1.5)(trainer, torch.zeros(1, 6), TURN)
    assert kept[MASK].tolist() == pytest.approx([0.0, 1.2214, 1.0, 1.0, 0.0], abs=1e-4)


@given(st.lists(st.floats(-3, 3, width=32), min_size=3, max_size=12), st.integers(1, 2))
def test_batch_statistics_do_not_see_how_episodes_are_spread_over_ranks(numbers, cut) -> None:
    returns = torch.tensor(numbers)
    group = torch.zeros(len(numbers), dtype=torch.int64)
    turns = torch.ones(len(numbers), dtype=torch.int64)
    whole = RewardNormalizer(by=ByBatch())(returns[:, None], turns, group)
    # the other rank's share of the two sums, in the order in which they are asked for
    parts = [returns[:cut], returns[cut:]]
    mean = returns.mean()
    sums = [
        torch.stack([returns.sum(), torch.tensor(float(len(numbers)))]),
        (returns - mean).square().sum(),
    ]
    for part, rows in ((parts[0], slice(0, cut)), (parts[1], slice(cut, None))):
        answers = iter(sums)
        one = RewardNormalizer(by=ByBatch())(
            part[:, None], turns[rows], group[rows], all_reduce=lambda _, to=answers: next(to)
        )
        torch.testing.assert_close(one, whole[rows], rtol=1e-3, atol=1e-3)


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.floats(-3, 3, width=32), min_size=3, max_size=3), min_size=2, max_size=6)
)
def test_clipped_returns_lie_within_their_bounds(rows) -> None:
    rewards, group = torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64)
    turns = torch.full((len(rows),), 3)
    bounded = RewardNormalizer(by=ByBatch(), clip_low=-1.0, clip_high=0.5)(rewards, turns, group)
    assert float(bounded.sum(1).min()) >= -1.001 and float(bounded.sum(1).max()) <= 0.501


@pytest.mark.parametrize("by", [ByGroup(), ByBatch(), Running()])
@pytest.mark.parametrize("size", [0.01, 1000.0])
def test_returns_that_agree_leave_turn_rewards_their_size(by, size) -> None:
    """Every episode of the group ran out of time: nine costs, and nothing to tell them apart."""
    rewards = torch.full((4, 9), -size)
    turns, group = torch.full((4,), 9), torch.zeros(4, dtype=torch.int64)
    found = RewardNormalizer(by=by)(rewards, turns, group)
    assert float(found.abs().max()) <= 10 * size
    assert float(found.sum(1).abs().max()) <= 1e-3 * size


def test_running_statistics_remember_and_are_resumed() -> None:
    one, other = (RewardNormalizer(by=Running(decay=0.5)) for _ in range(2))
    turns, group = torch.ones(2, dtype=torch.int64), torch.tensor([0, 0])
    first = torch.tensor([[1.0], [3.0]])
    scaled = torch.tensor([[-1.0], [1.0]])
    torch.testing.assert_close(one(first, turns, group), scaled, rtol=1e-4, atol=1e-4)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    second = torch.tensor([[5.0], [5.0]])
    found = one(second, turns, group)  # weight 3, sum 12, squares 55: mean 4, variance 7 / 3
    torch.testing.assert_close(found, torch.full((2, 1), (7 / 3) ** -0.5), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(other(second, turns, group), found)
    assert other.state_dict() == one.state_dict()


def test_a_schedule_moves_from_raw_to_batch_to_group() -> None:
    ladder = RewardNormalizer(by=Schedule(starts=[0, 1, 2]))
    returns, turns = torch.tensor([[0.0], [2.0], [10.0], [14.0]]), torch.ones(4, dtype=torch.int64)
    group = torch.tensor([0, 0, 1, 1])
    raw, batch, by_group = (ladder(returns, turns, group)[:, 0] for _ in range(3))
    assert raw.tolist() == [0.0, 2.0, 10.0, 14.0]
    assert float(batch.mean()) == pytest.approx(0, abs=1e-6) and float(batch[1]) < 0
    assert by_group.tolist() == pytest.approx([-0.7071, 0.7071, -0.7071, 0.7071], abs=1e-3)
    with pytest.raises(ValueError, match="expected as many rising"):
        Schedule(starts=[0, 5])


def test_the_penalty_of_a_token_outside_the_mask_is_carried_inside() -> None:
    values = torch.tensor([[1.0, 2.0, 0.0, 4.0, 8.0, 16.0]])
    inside = torch.tensor([[False, True, False, True, False, False]])
    carried = carry_into_mask(values, inside, TURN)
    assert carried.tolist() == [[0.0, 3.0, 0.0, 28.0, 0.0, 0.0]]


def test_masks_of_special_tokens_and_weights() -> None:
    labels, turn = torch.tensor([[1, 3, 2, 4, 7]]), torch.zeros(1, 5, dtype=torch.int64)
    assert sampled(labels, turn).tolist() == [[True, True, True, True, False]]
    assert no_special(labels, turn).tolist() == [[True, False, True, False, False]]
    assert think_weighted(labels, turn, think=0.5).tolist() == [[0.5, 1.0, 1.0, 1.0, 0.0]]


@pytest.fixture
def policy():
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return PolicyModule(build_small_lm(seed=0, text=small | {"num_key_value_heads": 2}))


def test_a_moving_average_follows_and_a_copy_stays(policy) -> None:
    average, frozen = MovingAverage(decay=0.75), FrozenCopy()
    following, staying = average.build(policy), frozen.build(policy)
    name, weight = next(iter(policy.named_parameters()))
    before = weight.detach().clone()
    with torch.no_grad():
        weight += 1.0
    average.follow(following, policy)
    frozen.follow(staying, policy)
    torch.testing.assert_close(dict(following.named_parameters())[name], before + 0.25)
    torch.testing.assert_close(dict(staying.named_parameters())[name], before)


def test_adapters_can_only_be_switched_off_where_there_are_some(policy) -> None:
    with pytest.raises(ValueError, match=r"no adapters to switch off; set model\.build\.lora"):
        AdaptersOff().build(policy)


def test_the_entropy_bonus_falls_to_nothing_at_its_target() -> None:
    loss = UpdateLoss(entropy_coefficient=0.1, entropy_target=2.0)
    assert loss.entropy_weight(0.0) == pytest.approx(0.1)
    assert loss.entropy_weight(1.0) == pytest.approx(0.05)
    assert loss.entropy_weight(3.0) == 0.0
    assert UpdateLoss(entropy_coefficient=0.1).entropy_weight(9.0) == 0.1
