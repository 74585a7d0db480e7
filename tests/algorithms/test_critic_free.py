"""Group baselines, batch scale, whitening and the group filters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threaded_ranks import on_ranks

from ragen_pl.algorithms.advantages.group import dr_grpo, group_std, grpo, rloo
from ragen_pl.algorithms.advantages.reinforce import batch, discounted_returns, raw
from ragen_pl.algorithms.group_filter import AboveDeviation, KeepAll, TopCount, TopFraction, TopMass
from ragen_pl.algorithms.whitening import masked_moments, whiten

maths = settings(max_examples=60, deadline=None, database=None, derandomize=True)
members = st.lists(
    st.tuples(st.floats(-5, 5, width=32), st.integers(0, 4)), min_size=1, max_size=20
)


@pytest.mark.parametrize("function", [grpo, dr_grpo, rloo])
def test_groups_of_one_or_of_equal_returns_get_exactly_zero(function) -> None:
    """0.1 three times has a rounded mean; the noise must not be divided by a tiny deviation."""
    returns = torch.tensor([0.1, 0.1, 0.1, 7.3])
    assert function(returns, torch.tensor([5, 5, 5, 2])).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_rounding_gives_no_advantage() -> None:
    """The same rewards added up in another order."""
    returns = torch.tensor(
        [[-0.1, -0.1, -0.1, 1.0], [1.0, -0.1, -0.1, -0.1], [-0.1, 1.0, -0.1, -0.1]]
    ).sum(1)
    assert len(set(returns.tolist())) > 1
    group = torch.zeros(3, dtype=torch.int64)
    for function in (grpo, dr_grpo, rloo, group_std):
        assert function(returns, group).tolist() == [0.0] * 3
    assert not AboveDeviation()(returns, group).any()
    # a difference of the last digits that training may learn from
    apart = torch.tensor([1.0, 1.0001])
    assert grpo(apart, group[:2]).abs().min() > 0.6 and AboveDeviation()(apart, group[:2]).all()


def test_group_baselines_by_hand() -> None:
    returns, group = torch.tensor([1.0, 2.0, 6.0, 10.0]), torch.tensor([3, 3, 3, 0])
    assert dr_grpo(returns, group).tolist() == [-2.0, -1.0, 3.0, 0.0]
    assert rloo(returns, group).tolist() == [-3.0, -1.5, 4.5, 0.0]
    assert group_std(returns, group).tolist() == pytest.approx([7**0.5] * 3 + [0.0])


@maths
@given(members, st.randoms(use_true_random=False))
def test_group_baselines_do_not_depend_on_the_order_of_members(pairs, random) -> None:
    order = list(range(len(pairs)))
    random.shuffle(order)
    returns, group = torch.tensor([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs])
    for function in (grpo, dr_grpo, rloo):
        whole = function(returns, group)
        torch.testing.assert_close(function(returns[order], group[order]), whole[order])
        for index in group.unique():
            assert whole[group == index].sum().item() == pytest.approx(0.0, abs=1e-3)


def test_raw_and_batch_ignore_groups() -> None:
    returns = torch.tensor([1.0, 2.0, 6.0])
    assert raw(returns).tolist() == [1.0, 2.0, 6.0]
    assert batch(returns).tolist() == pytest.approx([-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5])
    assert batch(torch.tensor([4.0])).tolist() == [0.0]


def test_discounts_count_tokens_of_the_mask_only() -> None:
    mask = torch.tensor([[True, False, False, True, True]])
    rewards = torch.tensor([[0.0, 5.0, 5.0, 0.0, 1.0]])
    assert discounted_returns(rewards, mask, gamma=0.5).tolist() == [[0.25, 0.0, 0.0, 0.5, 1.0]]


@maths
@given(st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=30), st.integers(1, 2))
def test_whitening_over_two_ranks_equals_whitening_the_whole(numbers, cut) -> None:
    x = torch.tensor(numbers) + 100.0
    mask = torch.arange(len(x)) % 3 != 1
    together = whiten(x, mask)
    alone = on_ranks(
        lambda reduce: whiten(x[:cut], mask[:cut], all_reduce=reduce),
        lambda reduce: whiten(x[cut:], mask[cut:], all_reduce=reduce),
    )
    torch.testing.assert_close(torch.cat(alone), together, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [0.1, 1e4])
def test_equal_elements_are_whitened_to_zero(size) -> None:
    """Rounding of the mean is as large as the deviation."""
    x = size * torch.tensor([1.0, 1.0 + 1e-7, 1.0 - 1e-7])
    everywhere = torch.ones(3, dtype=torch.bool)
    assert whiten(x, everywhere).tolist() == batch(x).tolist() == [0.0] * 3
    ranks = on_ranks(
        *[lambda reduce, part=part: batch(part, all_reduce=reduce) for part in x[:, None]]
    )
    assert torch.cat(ranks).tolist() == [0.0] * 3
    # one rank's elements are alike, those of all ranks are not
    apart = on_ranks(
        lambda reduce: batch(x, all_reduce=reduce), lambda reduce: batch(2 * x, all_reduce=reduce)
    )
    assert max(apart[0]) < -0.5 and min(apart[1]) > 0.5


def test_moments_ignore_padding_and_accept_empty_masks() -> None:
    x, mask = torch.tensor([2.0, 4.0, float("nan")]), torch.tensor([True, True, False])
    assert [m.item() for m in masked_moments(x, mask)] == [3.0, 2.0]
    assert [m.item() for m in masked_moments(x, mask & False)] == [0.0, 0.0]
    assert whiten(x, torch.tensor([True, False, False])).tolist() == [0.0, 0.0, 0.0]


RETURNS = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 4.0, 0.0, 2.0])
GROUPS = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])  # deviations in the ratio 0 : 1 : 4 : 2


@pytest.mark.parametrize(
    ("keep", "groups"),
    [
        (KeepAll(), [0, 1, 2, 3]),
        (TopFraction(), [2]),
        (TopFraction(fraction=0.5), [2, 3]),
        (TopFraction(fraction=0.3), [2, 3]),
        (TopFraction(fraction=0.25, minimum=3), [1, 2, 3]),
        (TopCount(count=3), [1, 2, 3]),
        (TopCount(count=9), [0, 1, 2, 3]),
        (TopMass(fraction=0.5), [2]),
        (TopMass(fraction=6 / 7), [2, 3]),
        (TopMass(fraction=0.9), [1, 2, 3]),
        (AboveDeviation(), [1, 2, 3]),
        (AboveDeviation(threshold=2.0), [2]),
    ],
)
def test_filters_keep_whole_groups_of_high_deviation(keep, groups) -> None:
    kept = keep(RETURNS, GROUPS)
    assert kept.dtype == torch.bool
    assert GROUPS[kept].unique().tolist() == groups
    assert kept.sum() == 2 * len(groups)


def test_filters_break_ties_by_group_index() -> None:
    assert TopCount(count=2)(torch.zeros(4), torch.tensor([7, 3, 5, 1])).tolist() == [
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopFraction(fraction=0.0),
        lambda: TopFraction(minimum=0),
        lambda: TopCount(count=0),
        lambda: TopMass(fraction=1.5),
    ],
)
def test_filters_reject_wrong_settings(make) -> None:
    with pytest.raises(ValueError, match=r": \w+=.*: expected"):
        make()
