"""Errors of public implementations that ours does not have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.episodes.trajectories import in_context, make_turn

import envs  # noqa: F401
from ragen_pl.algorithms.advantages.bilevel import bilevel_gae
from ragen_pl.algorithms.advantages.gae import masked_gae
from ragen_pl.algorithms.advantages.group import grpo
from ragen_pl.algorithms.aggregation import Aggregation, aggregate
from ragen_pl.algorithms.credit import place_turn_rewards
from ragen_pl.algorithms.group_filter import TopMass
from ragen_pl.algorithms.masks import until_action
from ragen_pl.algorithms.value_loss import value_loss
from ragen_pl.algorithms.whitening import whiten
from ragen_pl.data.collate import collate
from ragen_pl.data.loader import MinibatchLoader
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.models.build import build_small_lm
from ragen_pl.prompts.parsing import ParsedResponse
from ragen_pl.rewards.shaping import ActionEfficiency, RewardPlacement, WeightTerms
from ragen_pl.trajectory import Observation, Trajectory

TURNS = torch.tensor([[0, 0, 1, 1, 2, 2]])
FOUR = {"gamma_turn": 0.5, "lam_turn": 1.0, "gamma_token": 1.0, "lam_token": 1.0}


def test_turn_ends_do_not_depend_on_rewards() -> None:
    """A turn of reward 0 discounts what follows it. A trajectory with no reward is estimated like others."""
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0, 4.0]])
    advantages, _ = bilevel_gae(rewards, torch.zeros(1, 6), TURNS, **FOUR)
    assert advantages.tolist() == [[2.0, 2.0, 2.0, 2.0, 4.0, 4.0]]
    values = torch.full((1, 6), 0.5)
    advantages, _ = bilevel_gae(torch.zeros(1, 6), values, TURNS, **FOUR)
    assert advantages.tolist() == [[-0.5] * 6]


def test_bilevel_gae_differs_from_masked_gae() -> None:
    rewards, values = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0, 4.0]]), torch.zeros(1, 6)
    plain, _ = masked_gae(rewards, values, TURNS >= 0, gamma=1.0, lam=1.0)
    assert not torch.allclose(bilevel_gae(rewards, values, TURNS, **FOUR)[0], plain)


def test_format_penalty_survives_turn_rewards_and_shaping() -> None:
    manager = EnvironmentManager(
        target="ragen/FrozenLake-v0", format_penalty=0.3, invalid_ends=False, max_turns=2
    )
    slots = manager.open([EpisodeSpec(group=0, member=0, seed=0)])
    [first] = manager.step(slots, [ParsedResponse()])
    assert first.reward_terms == {"format": -0.3}
    for place in ("turn", "end"):
        for reward in (WeightTerms(), WeightTerms(turn=0.0), ActionEfficiency(penalty=0.1)):
            trajectory = played([(5, -0.3), (4, 1.0)])
            trajectory.turns[0].reward_terms = {"format": -0.3}
            trajectory.turns[1].reward_terms = {"environment": 1.0}
            for function in (reward, RewardPlacement(place=place)):
                function([trajectory], gather=lambda values: [values])
            assert trajectory.reward == pytest.approx(0.7)
            assert [turn.reward for turn in trajectory.turns][place == "end"] == pytest.approx(
                -0.3 if place == "turn" else 0.7
            )


def test_terminal_reward_moves_to_a_token_inside_the_mask() -> None:
    labels = torch.tensor([[1, 3, 2, 3, 4]])
    turn = torch.zeros(1, 5, dtype=torch.int64)
    mask = until_action(labels, turn)
    assert mask.tolist() == [[True, True, True, False, False]]
    placed = place_turn_rewards(torch.tensor([[2.0]]), turn, mask)
    assert placed.tolist() == [[0.0, 0.0, 2.0, 0.0, 0.0]]


def test_gae_steps_over_observation_tokens() -> None:
    values = torch.tensor([[1.0, 99.0, 99.0, 3.0]])
    mask = torch.tensor([[True, False, False, True]])
    advantages, returns = masked_gae(torch.zeros(1, 4), values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.5 * 3 - 1 + 0.25 * -3, 0.0, 0.0, -3.0]]
    assert returns[0, 1:3].tolist() == [0.0, 0.0]


def test_group_statistics_are_over_trajectories() -> None:
    """Eight turns against one: the long episode counts once."""
    assert grpo(torch.tensor([0.0, 2.0]), torch.tensor([0, 0])).tolist() == pytest.approx(
        [-(0.5**0.5), 0.5**0.5], abs=1e-5
    )
    batch = collate([played([(3, 0.0)] * 8), played([(3, 2.0)], member=1)], bundle(), weights=None)
    assert batch.episodes.turn_rewards.sum(1).tolist() == [0.0, 2.0]
    assert batch.episodes.group.tolist() == [0, 0] and len(batch.samples) == 9


def test_token_mean_is_over_the_whole_step() -> None:
    losses, mask = torch.tensor([[6.0, 0.0], [1.0, 1.0]]), torch.tensor([[1, 0], [1, 1]]) > 0
    parts = [
        aggregate(losses[row : row + 1], mask[row : row + 1], how=Aggregation.TOKEN_MEAN, tokens=3.0, sequences=2)
        for row in range(2)
    ]  # fmt: skip
    assert float(sum(parts)) == pytest.approx(8 / 3)  # the mean of the parts' means would be 3.5


def test_loader_yields_every_sample_once() -> None:
    batch = collate([played([(3, 0.0)], member=number) for number in range(5)], bundle())
    given = [
        number
        for minibatch in MinibatchLoader(batch, epochs=1, minibatches=4, accumulate=2)
        for number, weight in zip(
            minibatch.samples.episode.tolist(), minibatch.samples.weight.tolist(), strict=True
        )
        if weight
    ]
    assert sorted(given) == [0, 1, 2, 3, 4]


def test_top_mass_drops_groups_with_equal_returns() -> None:
    """A softmax over deviations of 0 and 0.5 would spread its mass nearly evenly, and keep all of them."""
    group = torch.arange(10).repeat_interleave(2)
    returns = torch.zeros(20)
    returns[1], returns[3] = 1.0, 1.0  # two groups of ten differ
    kept = TopMass(fraction=0.9)(returns, group)
    assert group[kept].unique().tolist() == [0, 1]


def test_value_loss_ignores_tokens_off_the_mask() -> None:
    mask = torch.tensor([[True, False]])
    values = torch.zeros(1, 2, requires_grad=True)
    loss = value_loss(values, torch.tensor([[1.0, -1e9]]), mask)
    loss.losses.sum().backward()
    assert loss.losses.tolist() == [[0.5, 0.0]] and values.grad.tolist() == [[-1.0, 0.0]]
    _, returns = masked_gae(torch.ones(1, 2), torch.full((1, 2), 7.0), mask, gamma=1.0, lam=1.0)
    assert returns.tolist() == [[1.0, 0.0]]


def test_whitening_ignores_padding() -> None:
    x, mask = torch.tensor([[1.0, 3.0, 0.0, 0.0]]), torch.tensor([[True, True, False, False]])
    for padding in (0.0, 50.0):
        x[~mask] = padding
        assert whiten(x, mask)[mask].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)


def test_response_at_the_length_limit_keeps_the_mask_on_sampled_tokens() -> None:
    trajectory = played([(-4, 0.0), (5, 1.0)], window="all")
    batch = collate([trajectory], bundle())
    samples = batch.samples
    trained = samples.input_ids[samples.loss_mask].tolist()
    assert trained == [id for turn in trajectory.turns for id in turn.response_ids.tolist()]
    assert batch.episodes.hit_length_limit.tolist() == [[True, False]]


_BUNDLE = []


def bundle():
    if not _BUNDLE:
        small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        _BUNDLE.append(build_small_lm(seed=0, text=small | {"num_key_value_heads": 2}))
    return _BUNDLE[0]


def played(responses, *, member=0, window=1) -> Trajectory:
    """An episode of responses given as (length, reward); a negative length is a cut response."""
    turns = []
    for number, (length, reward) in enumerate(responses):
        ids = np.arange(30 + number, 30 + number + abs(length))
        if length > 0:
            ids[-1] = bundle().end_of_turn_id
        observation = Observation(text=f"see {number}")
        turns.append(
            make_turn(
                observation=observation, response_ids=ids, thinks=len(ids), reward=reward, hit_length_limit=length < 0
            )
        )  # fmt: skip
    return in_context(bundle(), turns, window=window, member=member)
