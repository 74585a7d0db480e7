"""Normalization of returns."""

from __future__ import annotations

import copy
import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machines.threaded_ranks import on_ranks

from ragen_pl.algorithms.normalization import (
    ByBatch,
    ByGroup,
    NormalizedRewards,
    Raw,
    RewardNormalizer,
    Running,
    Schedule,
)


def returns_of(normalized: NormalizedRewards) -> torch.Tensor:
    """Return the normalized returns."""
    returns = normalized.turn_rewards.sum(1)
    return returns if normalized.center is None else returns - normalized.center


@given(st.lists(st.floats(-3, 3, width=32), min_size=3, max_size=12), st.integers(1, 2))
def test_batch_statistics_do_not_depend_on_the_split_over_ranks(numbers, cut) -> None:
    returns = torch.tensor(numbers)
    group = torch.zeros(len(numbers), dtype=torch.int64)
    turns = torch.ones(len(numbers), dtype=torch.int64)
    whole = RewardNormalizer(by=ByBatch())(returns[:, None], turns, group)

    def of_rank(rows: slice):
        return lambda reduce: RewardNormalizer(by=ByBatch())(
            returns[rows, None], turns[rows], group[rows], all_reduce=reduce
        )

    parts = on_ranks(of_rank(slice(0, cut)), of_rank(slice(cut, None)))
    for name in ("turn_rewards", "center"):
        joined = torch.cat([getattr(part, name) for part in parts])
        torch.testing.assert_close(joined, getattr(whole, name), rtol=1e-3, atol=1e-3)


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.floats(-3, 3, width=32), min_size=3, max_size=3), min_size=2, max_size=6)
)
def test_clipped_returns_lie_within_their_bounds(rows) -> None:
    rewards, group = torch.tensor(rows), torch.zeros(len(rows), dtype=torch.int64)
    turns = torch.full((len(rows),), 3)
    bounded = RewardNormalizer(by=ByBatch(), clip_low=-1.0, clip_high=0.5)(rewards, turns, group)
    returns = returns_of(bounded)
    assert float(returns.min()) >= -1.001 and float(returns.max()) <= 0.501


@pytest.mark.parametrize("by", [ByGroup(), ByBatch(), Running()])
@pytest.mark.parametrize("size", [0.01, 1000.0])
def test_equal_returns_keep_the_size_of_turn_rewards(by, size) -> None:
    """All episodes of the group reached the turn limit: nine equal costs."""
    rewards = torch.full((4, 9), -size)
    turns, group = torch.full((4,), 9), torch.zeros(4, dtype=torch.int64)
    normalized = RewardNormalizer(by=by)(rewards, turns, group)
    assert float(normalized.turn_rewards.abs().max()) <= 10 * size
    assert float(returns_of(normalized).abs().max()) <= 1e-3 * size


def test_running_statistics_accumulate_and_resume() -> None:
    normalizer, resumed = (RewardNormalizer(by=Running(decay=0.5)) for _ in range(2))
    turns, group = torch.ones(2, dtype=torch.int64), torch.tensor([0, 0])
    first = torch.tensor([[1.0], [3.0]])
    scaled = torch.tensor([-1.0, 1.0])
    torch.testing.assert_close(
        returns_of(normalizer(first, turns, group)), scaled, rtol=1e-4, atol=1e-4
    )
    resumed.load_state_dict(copy.deepcopy(normalizer.state_dict()))
    second = torch.tensor([[5.0], [5.0]])
    # weight 3, sum 12, squares 55: mean 4, variance 7 / 3
    normalized = returns_of(normalizer(second, turns, group))
    torch.testing.assert_close(normalized, torch.full((2,), (7 / 3) ** -0.5), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(returns_of(resumed(second, turns, group)), normalized)
    assert resumed.state_dict() == normalizer.state_dict()


def test_schedule_moves_from_raw_to_batch_to_group() -> None:
    normalizer = RewardNormalizer(by=Schedule(starts=[0, 1, 2]))
    returns, turns = torch.tensor([[0.0], [2.0], [10.0], [14.0]]), torch.ones(4, dtype=torch.int64)
    group = torch.tensor([0, 0, 1, 1])
    raw, batch, by_group = (returns_of(normalizer(returns, turns, group)) for _ in range(3))
    assert raw.tolist() == [0.0, 2.0, 10.0, 14.0]
    assert float(batch.mean()) == pytest.approx(0, abs=1e-6) and float(batch[1]) < 0
    assert by_group.tolist() == pytest.approx([-0.7071, 0.7071, -0.7071, 0.7071], abs=1e-3)
    with pytest.raises(ValueError, match="expected as many rising"):
        Schedule(starts=[0, 5])


def test_a_rule_of_another_kind_begins_anew():
    """A resume may have another one."""
    rewards, turns, group = torch.tensor([[1.0], [3.0]]), torch.ones(2).long(), torch.zeros(2)
    rules = (Raw, Running, ByBatch, Schedule, lambda: Schedule(stages=(Running(),), starts=(0,)))
    for before, after in itertools.product(rules, repeat=2):
        old, new = RewardNormalizer(by=before()), RewardNormalizer(by=after())
        old(rewards, turns, group.long())
        new.load_state_dict(json.loads(json.dumps(old.state_dict())))
        assert new.iteration == 1
        expected = old.by.state_dict() if before is after else after().state_dict()
        assert new.by.state_dict() == expected
