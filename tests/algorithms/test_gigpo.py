"""GiGPO by hand."""

from __future__ import annotations

import pytest
import torch

from ragen_pl.algorithms.advantages.gagpo import group_gae
from ragen_pl.algorithms.advantages.gigpo import GroupInGroup, StepBaseline, gigpo

# Two episodes: both begin in state 0; one meets state 5 twice, the other state 5 once and state 9.
REWARDS = torch.tensor([[0.0, 0.0, 2.0], [0.0, 1.0, 0.0]])
STATE = torch.tensor([[0, 5, 5], [0, 5, 9]])
# returns from each turn on: 0.5 1 2 and 0.5 1 0
STEP = {"gamma": 0.5, "scale_by_std": False}


def advantages(*, group=(0, 0), step_weight=1.0, **settings) -> torch.Tensor:
    groups = torch.tensor(group)
    return gigpo(
        REWARDS.sum(1), groups, REWARDS, STATE, step_weight=step_weight, **STEP, **settings
    )


def test_turns_are_compared_with_other_episodes_visits_of_their_state() -> None:
    # state 0: equal; state 5: 1 and 2 against 1, and 1 against their mean 1.5; no other episode is in state 9, whose
    # return is compared with that of the other episode, 2, less the own reward so far, 1
    steps = torch.tensor([[0.0, 0.0, 1.0], [0.0, -0.5, -1.0]])
    episode = torch.tensor([[0.5], [-0.5]])
    torch.testing.assert_close(advantages(), episode + steps)
    torch.testing.assert_close(advantages(step_weight=0.0), episode.expand(2, 3))
    # a group of one has nothing to compare with
    assert advantages(group=(0, 1)).tolist() == [[0.0] * 3] * 2


def test_published_turns_are_compared_with_all_visits_of_their_state() -> None:
    # state 0: mean 0.5; state 5: 1 2 1, mean 4/3
    expected = torch.tensor([[0.5, 0.5 - 1 / 3, 0.5 + 2 / 3], [-0.5, -0.5 - 1 / 3, -0.5]])
    torch.testing.assert_close(advantages(step_baseline=StepBaseline.ALL), expected)
    apart = advantages(step_baseline=StepBaseline.ALL, group=(0, 1))
    torch.testing.assert_close(apart, torch.tensor([[0.0, -0.5, 0.5], [0.0, 0.0, 0.0]]))
    scaled = advantages(step_baseline=StepBaseline.ALL, scale_steps=True) - advantages(
        step_weight=0.0
    )
    assert scaled[0, 2] == pytest.approx(2 / 3**0.5, abs=1e-4)
    with pytest.raises(ValueError, match="set step_baseline=all"):
        GroupInGroup(scale_steps=True)


def test_a_turn_in_an_unknown_state_has_the_advantage_of_its_episode() -> None:
    rewards = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    state, group = torch.tensor([[-1, 5], [-1, 5]]), torch.tensor([0, 0])
    for baseline, step in ((StepBaseline.ALL, 1.0), (StepBaseline.OTHERS, 2.0)):
        settings = {"gamma": 1.0, "step_weight": 1.0, "scale_by_std": False}
        found = gigpo(rewards.sum(1), group, rewards, state, step_baseline=baseline, **settings)
        # the first turns are no turns from the same state
        torch.testing.assert_close(found, torch.tensor([[1.0, 1 + step], [-1.0, -1 - step]]))


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_equal_episodes_have_no_advantage_by_rounding(lam) -> None:
    """Discounted returns of the same rewards differ in their last bits from a reward and the value that follows."""
    rewards = torch.tensor([[-0.1, -0.1, 0.3, 0.7]] * 3)
    state, turns = torch.tensor([[0, 1, 2, 3]] * 3), torch.tensor([4, 4, 4])
    same, apart = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1])
    for group in (same, apart):
        found = group_gae(rewards, state, group, turns, gamma=0.95, lam=lam)
        assert found[:2].tolist() == [[0.0] * 4] * 2
