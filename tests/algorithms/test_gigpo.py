"""GiGPO by hand."""

from __future__ import annotations

import torch

from ragen_pl.algorithms.advantages.gigpo import gigpo


def test_gigpo_compares_turns_that_start_in_the_same_state() -> None:
    """Two episodes: both begin in state 0; one meets state 5 twice, the other state 5 once and state 9."""
    rewards = torch.tensor([[0.0, 0.0, 2.0], [0.0, 1.0, 0.0]])
    state = torch.tensor([[0, 5, 5], [0, 5, 9]])
    group = torch.tensor([0, 0])
    step = {"gamma": 0.5, "scale_by_std": False}
    advantages = gigpo(rewards.sum(1), group, rewards, state, step_weight=1.0, **step)
    # returns from each turn on: 0.5 1 2 and 0.5 1 0; state 0: mean 0.5; state 5: 1 2 1, mean 4/3
    expected = torch.tensor([[0.5, 0.5 - 1 / 3, 0.5 + 2 / 3], [-0.5, -0.5 - 1 / 3, -0.5]])
    torch.testing.assert_close(advantages, expected)
    apart = gigpo(rewards.sum(1), torch.tensor([0, 1]), rewards, state, step_weight=1.0, **step)
    torch.testing.assert_close(apart, torch.tensor([[0.0, -0.5, 0.5], [0.0, 0.0, 0.0]]))
    without = gigpo(rewards.sum(1), group, rewards, state, step_weight=0.0, **step)
    torch.testing.assert_close(without, torch.tensor([[0.5] * 3, [-0.5] * 3]))


def test_a_turn_in_an_unknown_state_has_the_advantage_of_its_episode() -> None:
    rewards = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    state, group = torch.tensor([[-1, 5], [-1, 5]]), torch.tensor([0, 0])
    settings = {"gamma": 1.0, "step_weight": 1.0, "scale_by_std": False}
    advantages = gigpo(rewards.sum(1), group, rewards, state, **settings)
    # the first turns are no turns from the same state
    torch.testing.assert_close(advantages, torch.tensor([[1.0, 2.0], [-1.0, -2.0]]))
