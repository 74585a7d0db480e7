"""Weights of recorded episodes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.episodes.reference_cases import reference_cases

from ragen_pl.algorithms.record_weights import numbered, per_group, record_weights

CASES = reference_cases("record_weights")
maths = settings(max_examples=60, database=None, derandomize=True)
episodes = st.lists(
    st.tuples(st.sampled_from([-0.2, 0.0, 0.3, 0.7, 1.0]), st.integers(0, 3)),
    min_size=1,
    max_size=16,
)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_weights_are_those_of_the_reference_cases(case) -> None:
    inputs = dict(case["inputs"])
    columns = [torch.tensor(inputs.pop(name)) for name in ("returns", "success", "group")]
    weights = record_weights(*columns, **inputs)
    assert weights.tolist() == pytest.approx(case["outputs"]["weight"], abs=1e-9)


@maths
@given(episodes, st.integers(1, 3), st.floats(0.05, 5.0))
def test_rules_do_not_depend_on_a_shift_or_on_rounding(drawn, best, temperature) -> None:
    returns = torch.tensor([one for one, _ in drawn], dtype=torch.float64)
    group = torch.tensor([one for _, one in drawn])
    success = returns > 0.5
    exponential = record_weights(
        returns, success, group, rule="exponential", temperature=temperature, cap=1e9
    )
    shifted = record_weights(
        returns + 3.0, success, group, rule="exponential", temperature=temperature, cap=1e9
    )
    assert torch.allclose(exponential, shifted) and exponential.mean().item() == pytest.approx(1.0)
    # the weight rises e-fold with each `temperature` of return
    ratio = exponential / exponential[0]
    assert torch.allclose(ratio.log(), (returns - returns[0]) / temperature, atol=1e-6)
    chosen = record_weights(returns, success, group, rule="best", best=best)
    for number in set(group.tolist()):
        own, taken = returns[group == number], chosen[group == number] > 0
        assert taken.sum() == min(best, len(own))
        assert not (~taken).any() or own[taken].min() >= own[~taken].max()
    rounded = returns * (1 - 1e-9)
    for rule in ("threshold", "best"):
        same = [
            record_weights(values, success, group, rule=rule, threshold=0.7, best=best)
            for values in (returns, rounded)
        ]
        assert torch.equal(*same)


def test_groups_count_alike() -> None:
    group = numbered(["a", "b", "a", "a", "c"])
    assert group.tolist() == [0, 1, 0, 0, 2]
    weights = per_group(torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]), group)
    assert weights.tolist() == [0.5, 1.0, 0.5, 0.0, 0.0]


def test_of_returns_that_are_equal_but_for_rounding_the_first_is_the_best() -> None:
    rewards = [[-0.1, -0.1, -0.1, 1.0], [1.0, -0.1, -0.1, -0.1], [-0.1, 1.0, -0.1, -0.1]]
    returns = torch.tensor([sum(row) for row in rewards], dtype=torch.float64)
    assert returns[0] < returns[1]
    everywhere = torch.zeros(3, dtype=torch.int64)
    for best, expected in ((1, [1.0, 0.0, 0.0]), (2, [1.0, 1.0, 0.0])):
        weights = record_weights(returns, returns > 0, everywhere, rule="best", best=best)
        assert weights.tolist() == expected
    # not across groups, and not what is apart
    apart = torch.tensor([0.7, 0.7001, 0.7], dtype=torch.float64)
    found = record_weights(apart, apart > 0, torch.tensor([0, 0, 1]), rule="best")
    assert found.tolist() == [0.0, 1.0, 1.0]
