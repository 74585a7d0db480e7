"""Temperature of each turn: the rule, the recorded value, and the value that the trainer divides by."""

from dataclasses import replace

import pytest
import torch
from support.episodes.trajectories import make_turn, roll_out, starts

from ragen_pl.data.collate import collate
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.temperature import AdaptiveTemperature
from ragen_pl.trajectory import Summary


def test_rule_with_hand_computed_values() -> None:
    rule = AdaptiveTemperature(beta=0.2, low=0.5, high=1.5, window=2, reward=1.0, effective=0.5)
    good, bad = make_turn(reward=1.0), make_turn(reward=-0.5, action_is_effective=False)
    assert rule(1.0, []) == 1.0
    assert rule(1.0, [good]) == pytest.approx(1.0 + 0.2 * 1.5)
    assert rule(1.0, [good, bad]) == pytest.approx(1.0 + 0.2 * (1.5 - 1.0) / 2)
    assert rule(1.0, [good, bad, bad]) == pytest.approx(1.0 - 0.2)
    summary = replace(bad, reward_terms={}, kind=Summary())
    assert rule(1.0, [good, summary]) == rule(1.0, [good]) and rule(1.0, [summary]) == 1.0
    assert replace(rule, beta=9.0)(1.0, [good]) == 1.5
    assert replace(rule, beta=9.0)(1.0, [bad]) == 0.5


def played(bundle, rule, *, greedy=False):
    proxy = AgentProxy(
        environments=EnvironmentManager(
            target="ragen/FrozenLake-v0", max_turns=4, invalid_ends=False, format_penalty=0.3
        ),
        context=ContextManager(bundle, window="all", system_prompt=None),
        max_response_tokens=12, temperature=0.9, adaptive_temperature=rule,
    )  # fmt: skip
    return roll_out(proxy, TransformersEngine(PolicyModule(bundle)), starts(6), greedy=greedy)


def test_turns_are_scored_at_their_sampling_temperature(lm) -> None:
    rule = AdaptiveTemperature(beta=0.4, low=0.5, high=1.4)
    trajectories = played(lm, rule)
    recorded = [[turn.temperature for turn in episode.turns] for episode in trajectories]
    for episode, temperatures in zip(trajectories, recorded, strict=True):
        turns = episode.turns
        assert temperatures == [rule(0.9, turns[:number]) for number in range(len(turns))]
    assert len({temperature for temperatures in recorded for temperature in temperatures}) > 1
    samples = collate(trajectories, lm).samples
    with torch.no_grad():
        logprobs = PolicyModule(lm)(samples, torch.zeros(0)).logprobs
    sampled = samples.turn >= 0
    assert (logprobs - samples.rollout_logprobs)[sampled].abs().max() < 2e-5
    samples.temperature = torch.full_like(samples.temperature, 0.9)
    with torch.no_grad():
        wrong = PolicyModule(lm)(samples, torch.zeros(0)).logprobs
    assert (wrong - samples.rollout_logprobs)[sampled].abs().max() > 1e-2


def test_zero_weight_changes_nothing(lm) -> None:
    constant, adaptive = played(lm, None), played(lm, AdaptiveTemperature(beta=0.0))
    for expected, episode in zip(constant, adaptive, strict=True):
        assert [turn.temperature for turn in episode.turns] == [0.9] * len(episode.turns)
        for turn, other in zip(expected.turns, episode.turns, strict=True):
            assert turn.response_ids.tolist() == other.response_ids.tolist()
            assert turn.response_logprobs.tolist() == other.response_logprobs.tolist()


def test_greedy_turns_record_temperature_one(lm) -> None:
    rule = AdaptiveTemperature(beta=0.4)
    trajectories = played(lm, rule, greedy=True)
    assert {turn.temperature for episode in trajectories for turn in episode.turns} == {1.0}


@pytest.mark.parametrize("wrong", [{"low": 0.0}, {"low": 2.0}, {"window": 0}])
def test_invalid_settings_raise(wrong) -> None:
    with pytest.raises(ValueError, match=r"low|window"):
        AdaptiveTemperature(**wrong)
