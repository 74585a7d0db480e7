"""Group baselines, batch scale, whitening and the group filters."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.episodes.reference_cases import reference_cases
from support.machines.threaded_ranks import on_ranks

from ragen_pl.algorithms.advantages.gdpo import Decoupled, Final, gdpo
from ragen_pl.algorithms.advantages.gigpo import step_returns
from ragen_pl.algorithms.advantages.graphgpo import GraphRelative
from ragen_pl.algorithms.advantages.group import (
    SuccessRelative,
    dr_grpo,
    group_std,
    grpo,
    maxrl,
    rloo,
)
from ragen_pl.algorithms.advantages.reinforce import batch, discounted_returns, raw
from ragen_pl.algorithms.credit import AdvantageInputs
from ragen_pl.algorithms.equality import sums_of
from ragen_pl.algorithms.group_filter import AboveDeviation, KeepAll, TopCount, TopFraction, TopMass
from ragen_pl.algorithms.whitening import masked_moments, whiten

maths = settings(max_examples=60, database=None, derandomize=True)
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


def test_sums_of_the_same_rewards_are_equal_in_any_order() -> None:
    """Also where they cancel: what rounding leaves has no size that it could be compared with."""
    rewards = torch.tensor([[-0.1] * place + [1.0] + [-0.1] * (10 - place) for place in range(11)])
    # turns of several actions
    rewards = torch.cat([rewards, torch.tensor([[-0.3, 1.0, -0.7] + [0.0] * 8])])
    group = torch.zeros(12, dtype=torch.int64)
    assert grpo(rewards.sum(1), group).abs().max() > 0.01
    assert not grpo(sums_of(rewards), group).any()
    assert sums_of(rewards[:, :5]).tolist() == pytest.approx(rewards[:, :5].sum(1).tolist())
    of_turns = step_returns(rewards[:11], gamma=1.0)
    assert of_turns[:, 0].tolist() == [float(of_turns[0, 0])] * 11


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


def of_one_token(returns: list[float], **changes) -> AdvantageInputs:
    """Episodes of one group with one token each."""
    rows = len(returns)
    everywhere = torch.ones(rows, 1, dtype=torch.bool)
    return AdvantageInputs(
        rewards=torch.tensor(returns)[:, None], values=None, advantage_mask=everywhere, loss_mask=everywhere,
        turn=torch.zeros(rows, 1, dtype=torch.int64), group=torch.zeros(rows, dtype=torch.int64),
        bootstrap=torch.zeros(rows), returns=torch.tensor(returns), **changes,
    )  # fmt: skip


@pytest.mark.parametrize("members", [1, 2, 3, 5])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_maxrl_has_the_gradient_of_the_log_likelihood_up_to_its_order(members, rate) -> None:
    """All groups of a policy that solves the task at a rate; log p = -sum_k (1 - p)^k / k."""
    gradient = 0.0
    for solved in itertools.product([False, True], repeat=members):
        advantages = maxrl(torch.tensor(solved), torch.zeros(members, dtype=torch.int64))
        chance = torch.tensor([rate if one else 1 - rate for one in solved]).prod()
        scores = torch.tensor([1 / rate if one else -1 / (1 - rate) for one in solved])
        gradient += float(chance * (advantages * scores).mean())
    expected = sum((1 - rate) ** (k - 1) for k in range(1, members))
    assert gradient == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_maxrl_reads_success_and_needs_one_that_is_said() -> None:
    solved = torch.tensor([1, 0, 0, -1], dtype=torch.int8)
    given = of_one_token([0.1, 5.0, -1.0, 0.0], success=solved)
    assert SuccessRelative()(given).advantages[:, 0].tolist() == [3.0, -1.0, -1.0, -1.0]
    given.success = torch.full((4,), -1, dtype=torch.int8)
    with pytest.raises(ValueError, match=r'no episode that says .* info\["success"\]'):
        SuccessRelative()(given)
    given.success = None
    with pytest.raises(ValueError, match="no episode that says"):
        SuccessRelative()(given)


@pytest.mark.parametrize("estimator", [SuccessRelative(), GraphRelative(scale_by_std=False)])
def test_success_may_be_said_on_another_rank(estimator) -> None:
    """On the first rank no episode says it, and a third one has no episodes."""

    def of_rank(said: list[int]):
        state = torch.zeros(len(said), 1, dtype=torch.int64)
        inputs = of_one_token([float(max(one, 0)) for one in said], state=state)
        inputs.success = torch.tensor(said, dtype=torch.int8)

        def estimate(reduce) -> list[list[float]] | str:
            try:
                return estimator(inputs, all_reduce=reduce).advantages.tolist()
            except ValueError as error:
                return str(error)

        return estimate

    silent, says, empty = map(of_rank, ([-1, -2], [1, 0], []))
    found = on_ranks(silent, says, empty)
    assert found[0] == [[0.0], [0.0]] and found[1][0][0] > 0 > found[1][1][0] and found[2] == []
    for text in on_ranks(silent, empty):
        assert "no episode that says" in text
    # none could
    assert on_ranks(of_rank([-2, -2]), empty) == [[[0.0], [0.0]], []]


@pytest.mark.parametrize("case", reference_cases("gdpo"))
def test_gdpo_of_the_reference(case: dict) -> None:
    """`terms` [term][episode], `tokens` of an episode, `sum` before the last step."""
    given = case["inputs"]
    columns = torch.tensor(given["terms"]), given["weights"], torch.tensor(given["group"])
    for final, expected in ((Final.NONE, "sum"), (Final(given["final"]), "advantages")):
        found = gdpo(*columns, final=final, tokens=torch.tensor(given["tokens"]), eps=given["eps"])
        wanted = torch.tensor(case["outputs"][expected])
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@maths
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=8),
    st.sampled_from([0.01, 1.0, 1000.0]),
    st.sampled_from(list(Final)),
)
def test_gdpo_does_not_depend_on_the_scale_of_a_term(pairs, scale, final) -> None:
    """And terms that cancel are 0, not the noise of their rounding divided by its deviation."""
    first, second = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    group, tokens = torch.arange(len(pairs)) // 4, torch.arange(1, len(pairs) + 1)
    settings = {"final": final, "tokens": tokens, "eps": 1e-15}
    expected = gdpo(torch.stack([first, second]), [1.0, 0.5], group, **settings)
    scaled = gdpo(torch.stack([first, scale * second + 7.0]), [1.0, 0.5], group, **settings)
    torch.testing.assert_close(scaled, expected, rtol=1e-3, atol=1e-3)
    cancelled = gdpo(torch.stack([first, 0.3 - scale * first]), [0.7, 0.7], group, **settings)
    assert cancelled.tolist() == [0.0] * len(pairs)


def test_gdpo_over_two_ranks_equals_the_whole() -> None:
    terms, group = (
        torch.tensor([[1.0, 0.0, 2.0, 7.0, 0.0], [0.1, 0.3, 0.0, 0.2, 0.2]]),
        torch.tensor([0, 0, 1, 1, 1]),
    )
    tokens = torch.tensor([3, 1, 4, 1, 5])
    for final in (Final.EPISODES, Final.TOKENS):
        whole = gdpo(terms, [1.0, 2.0], group, final=final, tokens=tokens)
        parts = on_ranks(*[
            lambda reduce, rows=rows, final=final: gdpo(
                terms[:, rows], [1.0, 2.0], group[rows], final=final, tokens=tokens[rows], all_reduce=reduce
            )
            for rows in (slice(0, 2), slice(2, 5))
        ])  # fmt: skip
        torch.testing.assert_close(torch.cat(parts), whole)


def test_gdpo_takes_its_terms_by_name_with_their_parts() -> None:
    terms = {
        "environment/goal": torch.tensor([1.0, 0.0, 1.0]), "environment/cost": torch.tensor([-0.5, 0.0, 0.0]),
        "format": torch.tensor([0.0, -1.0, 0.0]), "judge": torch.tensor([9.0, 0.0, 0.0]),
    }  # fmt: skip
    given = of_one_token([0.5, -1.0, 1.0], terms=terms)
    found = Decoupled(final="none")(given).advantages[:, 0]
    columns = torch.tensor([[0.5, 0.0, 1.0], [0.0, -1.0, 0.0]])
    torch.testing.assert_close(found, gdpo(columns, [1.0, 1.0], given.group, final=Final.NONE))
    # a penalty that no episode got adds 0, and a name that no reward function sets is refused
    found = Decoupled(weights={"format": 1.0, "overlong": 1.0}, final="none")(given).advantages[
        :, 0
    ]
    torch.testing.assert_close(found, gdpo(columns[1:], [1.0], given.group, final=Final.NONE))
    with pytest.raises(ValueError, match="no episode has a reward term goals;"):
        Decoupled(weights={"format": 1.0, "goals": 1.0})(given)
    # of malformed responses none reaches the environment
    malformed = of_one_token([-1.0, 0.0, -1.0], terms={"format": terms["format"]})
    found = Decoupled(final="none")(malformed).advantages[:, 0]
    torch.testing.assert_close(found, gdpo(columns[1:], [1.0], given.group, final=Final.NONE))
    # another rank has it
    others = of_one_token([1.0], terms={"goals": torch.tensor([1.0])})
    both = Decoupled(weights={"format": 1.0, "goals": 1.0}, final="none")
    on_ranks(*[lambda reduce, own=own: both(own, all_reduce=reduce) for own in (given, others)])
    with pytest.raises(ValueError, match="environment/goal is a part of environment"):
        Decoupled(weights={"environment": 1.0, "environment/goal": 1.0})
    with pytest.raises(ValueError, match="at least one reward term"):
        Decoupled(weights={})


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
