"""Shares of environments: the schedule of groups, whitening inside each environment, weights of tokens."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.episodes.reference_cases import reference_cases
from support.machines.threaded_ranks import on_ranks

from ragen_pl.algorithms.mixture import (
    MixtureSchedule,
    environment_weights,
    mixture_schedule,
    whiten_by_environment,
)

# share: of each environment; environment: of each group of each iteration, or of each row
SCHEDULES = reference_cases("mixture_schedule")
ADVANTAGES = reference_cases("mixture_advantages")
SHARES = st.lists(st.floats(0, 5), min_size=1, max_size=5).filter(lambda share: sum(share) > 0.1)


@pytest.mark.parametrize("case", SCHEDULES)
def test_schedule_is_that_of_a_plain_loop(case):
    given = case["inputs"]
    found = mixture_schedule(given["share"], groups=given["groups"], iterations=given["iterations"])
    assert found == case["outputs"]["environment"]


@pytest.mark.parametrize("case", ADVANTAGES)
def test_advantages_and_weights_are_those_of_a_plain_loop(case):
    given, expected = case["inputs"], case["outputs"]
    mask, environment = torch.tensor(given["mask"]), torch.tensor(given["environment"])
    whitened = whiten_by_environment(
        torch.tensor(given["advantages"]), mask, environment, environments=len(given["share"])
    )
    weight = environment_weights(mask, environment, given["share"])
    torch.testing.assert_close(whitened, torch.tensor(expected["whitened"]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight, torch.tensor(expected["loss_weight"]), rtol=1e-5, atol=1e-5)


@given(SHARES, st.integers(1, 200))
def test_counts_follow_the_shares_and_a_share_of_0_is_never_played(share, groups):
    places = [MixtureSchedule(share).place(group) for group in range(groups)]
    counts = Counter(place.environment for place in places)
    for number, one in enumerate(share):
        lag = one / sum(share) * groups - counts[number]
        assert -1 < lag < max(1, len(share) - 1)
        assert one or not counts[number]
        own = [place.number for place in places if place.environment == number]
        assert own == [*range(counts[number])]


@given(SHARES, st.integers(0, 50))
def test_a_resumed_schedule_goes_on_as_the_whole_one(share, first):
    whole, resumed = MixtureSchedule(share), MixtureSchedule(share)
    expected = [whole.place(group) for group in range(first + 5)]
    assert [resumed.place(group) for group in range(first, first + 5)] == expected[first:]


@pytest.mark.parametrize("share", [[0.0, 0.0], [1.0, -0.5], [float("nan")], []])
def test_shares_that_say_nothing_are_refused(share):
    with pytest.raises(ValueError, match="share="):
        MixtureSchedule(share)


ROWS = {
    "advantages": torch.tensor([[1.0, 2.0, 4.0], [0.5, -1.0, 0.0], [3.0, 3.5, 9.0]]),
    "mask": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0]]) > 0,
    "environment": torch.tensor([0, 0, 1]),
}


def test_scale_and_shift_of_one_environment_change_nothing():
    mine = whiten_by_environment(**ROWS, environments=2)
    larger = (
        ROWS["advantages"] * torch.tensor([[1.0], [1.0], [10.0]]) + ROWS["environment"][:, None]
    )
    changed = whiten_by_environment(**{**ROWS, "advantages": larger}, environments=2)
    torch.testing.assert_close(changed, mine)


def test_each_environment_has_its_share_of_the_weight():
    weight = environment_weights(ROWS["mask"].float() * 0.5, ROWS["environment"], [1.0, 3.0, 7.0])
    total = float(weight.sum())
    assert total == pytest.approx(3.5)
    assert float(weight[2].sum()) == pytest.approx(0.75 * total)


def test_tokens_of_environments_without_a_share_keep_their_weight():
    weight = ROWS["mask"].float()
    assert torch.equal(environment_weights(weight, ROWS["environment"], [0.0, 0.0, 1.0]), weight)


def test_rows_on_two_ranks_are_treated_as_on_one():
    """Each rank reduces for every environment, also for one that it has no row of."""
    parts = [
        {name: rows[part] for name, rows in ROWS.items()} for part in (slice(0, 2), slice(2, 3))
    ]

    def whitened(rows, reduce=None):
        return whiten_by_environment(**rows, environments=2, all_reduce=reduce)

    def weighted(rows, reduce=None):
        return environment_weights(rows["mask"], rows["environment"], [1.0, 1.0], all_reduce=reduce)

    for function in (whitened, weighted):
        found = on_ranks(*[lambda reduce, own=own, f=function: f(own, reduce) for own in parts])
        torch.testing.assert_close(torch.cat(found), function(ROWS))
