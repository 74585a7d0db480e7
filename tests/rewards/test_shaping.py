"""Reward functions with hand-computed values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.episodes.trajectories import make_trajectory, make_turn

from ragen_pl.rewards.shaping import (
    ActionEfficiency,
    OverlongPenalty,
    RewardPlacement,
    ThinkLength,
    WeightTerms,
)
from ragen_pl.trajectory import ProgramCall, Summary, Trajectory, Turn


def turn(*, thinks=0, valid=True, effective=True, hit_length_limit=False, **terms) -> Turn:
    return make_turn(
        tokens=thinks + 1, thinks=thinks, action_is_valid=valid, action_is_effective=effective,
        hit_length_limit=hit_length_limit, reward_terms=terms,
    )  # fmt: skip


def shaped(reward, *turns) -> Trajectory:
    trajectory = make_trajectory(*turns)
    reward([trajectory], gather=lambda values: [values])
    return trajectory


def terms_of(trajectory: Trajectory) -> list[dict[str, float]]:
    return [turn.reward_terms for turn in trajectory.turns]


def test_weights_depend_on_the_term_and_the_turn():
    weights = WeightTerms(turn=2.0, final=3.0, format=4.0)
    trajectory = shaped(
        weights, turn(environment=1.0), turn(format=-0.5), turn(environment=1.0, other=1.0)
    )
    assert terms_of(trajectory) == [
        {"environment": 2.0},
        {"format": -2.0},
        {"environment": 3.0, "other": 1.0},
    ]
    assert trajectory.reward == 2.0 - 2.0 + 4.0


def test_think_length_is_linear_between_its_limits():
    reward = ThinkLength(amount=0.5, low=2, high=6)
    trajectory = shaped(reward, *(turn(thinks=number) for number in (1, 2, 4, 6, 9)))
    assert [terms["think_length"] for terms in terms_of(trajectory)] == [0.0, 0.0, 0.25, 0.5, 0.5]
    with pytest.raises(ValueError, match="expected low < high"):
        ThinkLength(low=4, high=4)


def test_action_efficiency_penalizes_valid_actions_without_effect():
    trajectory = shaped(
        ActionEfficiency(penalty=0.1),
        turn(effective=False),
        turn(),
        turn(effective=False, valid=False),
        replace(turn(effective=False), kind=Summary()),
    )
    assert terms_of(trajectory) == [{"action_efficiency": -0.1}, {}, {}, {}]


def test_overlong_penalizes_responses_at_their_length_limit():
    trajectory = shaped(OverlongPenalty(penalty=0.2), turn(hit_length_limit=True), turn())
    assert terms_of(trajectory) == [{"overlong": -0.2}, {}]


def test_placement_moves_all_terms_to_the_last_turn():
    trajectory = shaped(
        RewardPlacement(place="end"),
        turn(environment=1.0),
        turn(environment=2.0, format=-0.5),
        turn(),
    )
    assert terms_of(trajectory) == [{}, {}, {"environment": 3.0, "format": -0.5}]
    assert trajectory.reward == 2.5


@pytest.mark.parametrize(
    "reward",
    [WeightTerms(), ThinkLength(), ActionEfficiency(), OverlongPenalty(), RewardPlacement()],
)
def test_default_settings_change_no_term(reward):
    trajectory = shaped(
        reward, turn(environment=0.1, thinks=3, effective=False), turn(format=-0.05)
    )
    assert terms_of(trajectory) == [{"environment": 0.1}, {"format": -0.05}]


@pytest.mark.parametrize(
    "reward",
    [
        ThinkLength(amount=-1.0, high=8),
        ActionEfficiency(penalty=1.0),
        OverlongPenalty(penalty=1.0),
    ],
    ids=lambda reward: type(reward).__name__,
)
def test_the_form_of_a_response_that_is_not_trained_on_earns_nothing(reward):
    form = {"thinks": 8, "effective": False, "hit_length_limit": True}
    other = turn(**form)
    other.kind = ProgramCall(trained=False)
    trajectory = shaped(reward, turn(**form), other)
    assert trajectory.turns[0].reward == -1.0 and other.reward_terms == {}
