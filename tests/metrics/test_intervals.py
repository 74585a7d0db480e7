"""Metrics of a validation set against numbers computed by hand or by counting."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.episodes.trajectories import make_trajectory, make_turn

from ragen_pl.metrics.intervals import (
    clustered,
    pass_at,
    success_by_difficulty,
    validation_metrics,
)
from ragen_pl.metrics.proportions import wilson
from ragen_pl.trajectory import EpisodeStatus, Trajectory


def episode(group: int, member: int, **fields: Any) -> Trajectory:
    return make_trajectory(group=group, member=member, **({"difficulty": 1} | fields))


def test_wilson_matches_published_values() -> None:
    # 81 of 263: Newcombe (1998), table I
    interval = wilson(81 / 263, count=263)
    assert (round(interval.low, 4), round(interval.high, 4)) == (0.2553, 0.3662)
    none = wilson(0.0, count=20)  # Newcombe's second example: 0 of 20
    assert (none.low, round(none.high, 4)) == (0.0, 0.1611)
    assert none.half_width == pytest.approx(none.high / 2)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(
    samples: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(samples)))
    subsets = list(combinations(samples, k))
    counted = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at(k, samples=len(samples), successes=sum(samples)) == pytest.approx(counted)


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="pass_at: found 3, expected 1 to 2"):
        pass_at(3, samples=2, successes=1)


def test_samples_of_a_group_are_not_independent_trials() -> None:
    alike = [[True] * 8] * 5 + [[False] * 8] * 5
    # Their variance is that of 10 trials at most.
    assert clustered(alike) == wilson(0.5, count=10)
    mixed = [[True, False] * 4] * 10
    assert clustered(mixed).low <= 0.5 <= clustered(mixed).high
    assert clustered([[True], [False]]) == wilson(0.5, count=2)
    # a large group counts by its samples
    uneven = [[True] * 6 + [False] * 2, *[[True] + [False] * 3] * 2]
    variance = 3 / 2 * ((6 - 4) ** 2 + 2 * (1 - 2) ** 2) / 16**2
    assert clustered(uneven) == wilson(0.5, count=0.25 / variance)


def test_validation_metrics_by_hand() -> None:
    played = [
        episode(0, 0, success=True), episode(0, 1, success=True),
        episode(1, 0, success=True, difficulty=2), episode(1, 1, success=False, difficulty=2),
        episode(2, 0, success=False, difficulty=2), episode(2, 1, success=False, difficulty=2),
    ]  # fmt: skip
    metrics = validation_metrics(played, pass_ks=[1, 2])
    assert (metrics["episodes"], metrics["success"]) == (6.0, 0.5)
    assert (metrics["pass@1"], metrics["pass@2"]) == (0.5, pytest.approx(2 / 3))
    assert metrics["pass@2_low"] < 2 / 3 < metrics["pass@2_high"]
    # No response was given.
    assert "valid_actions" not in metrics
    levels = success_by_difficulty(played)
    assert {
        level: (level_metrics["episodes"], level_metrics["success"])
        for level, level_metrics in levels.items()
    } == {
        1: (2.0, 1.0),
        2: (4.0, 0.25),
    }
    assert success_by_difficulty([episode(0, 0, success=True, difficulty=None)]) == {}


def test_equal_initial_states_of_greedy_play_are_one_trial() -> None:
    """256 episodes from 100 states have the interval of 100."""
    played = [
        _from_state(episode(number, 0, success=number % 100 < 40), f"state {number % 100}")
        for number in range(200)
    ]
    metrics = validation_metrics(played)
    assert metrics["distinct_states"] == 100.0 and metrics["episodes"] == 200.0
    assert metrics["success_low"] == pytest.approx(wilson(0.4, count=100).low)
    # all differ, or there is one state only, or states are not recorded
    for name in ("{number}", "the only one", None):
        played = [
            _from_state(
                episode(number, 0, success=number % 100 < 40),
                name and name.format(number=number),
            )
            for number in range(200)
        ]
        metrics = validation_metrics(played)
        assert metrics["success_low"] == pytest.approx(wilson(0.4, count=200).low)
    assert "distinct_states" not in metrics


def _from_state(trajectory: Trajectory, key: str | None) -> Trajectory:
    return replace(trajectory, turns=[make_turn()], initial_state_key=key)


@pytest.mark.parametrize("name", ["state {number}", None])
def test_the_seats_of_a_game_are_no_independent_trials(name: str | None) -> None:
    # as of a clerk and its customer, who succeed together
    played = [
        _from_state(
            episode(2 * number + seat, 0, seat=seat, seats=2, success=number % 100 < 40),
            name and name.format(number=number),
        )
        for number in range(100)
        for seat in (0, 1)
    ]
    metrics = validation_metrics(played, pass_ks=[1])
    expected = wilson(0.4, count=100)
    assert metrics["episodes"] == 200.0
    for low in (metrics["success_low"], metrics["pass@1_low"]):
        assert low == pytest.approx(expected.low, abs=2e-3)
    (level,) = success_by_difficulty(played).values()
    assert level["success_low"] == metrics["success_low"]


def test_failed_episodes_are_left_out() -> None:
    played = [
        episode(0, 0, success=True), episode(0, 1, success=False),
        episode(1, 0, success=True), episode(1, 1, status=EpisodeStatus.FAILED),
    ]  # fmt: skip
    metrics = validation_metrics(played, pass_ks=[1, 2])
    assert (metrics["episodes"], metrics["failed_episodes"]) == (3.0, 1.0)
    assert metrics["success"] == pytest.approx(2 / 3) and metrics["failed"] == 0.25
    # pass@2 is that of the group with two episodes
    assert metrics["pass@1"] == pytest.approx(metrics["success"]) and metrics["pass@2"] == 1.0
    assert success_by_difficulty(played)[1]["episodes"] == 3
    with pytest.raises(ValueError, match="every episode failed"):
        validation_metrics(played[3:])
