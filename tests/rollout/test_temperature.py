"""A temperature for each turn: the rule, what is recorded, and that the trainer divides by the same one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ragen_pl.data.collate import collate
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.rollout.context import ContextManager
from ragen_pl.rollout.environments import EnvironmentManager, EpisodeSpec
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.temperature import AdaptiveTemperature
from ragen_pl.rollout.transformers_engine import TransformersEngine
from ragen_pl.trajectory import Observation, Turn


def turn(*, reward: float, effective: bool) -> Turn:
    none = np.zeros(0, np.int64)
    return Turn(
        observation=Observation(text=""), prompt_ids=none, prompt_images=[], response_ids=none,
        response_logprobs=none, response_entropy=0.0, spans=none, response_text="", think=None, actions=[],
        action_is_valid=True, action_is_effective=effective, hit_length_limit=False, reward=reward,
        temperature=1.0,
    )  # fmt: skip


def test_the_rule_by_hand() -> None:
    rule = AdaptiveTemperature(beta=0.2, low=0.5, high=1.5, window=2, reward=1.0, effective=0.5)
    good, bad = turn(reward=1.0, effective=True), turn(reward=-0.5, effective=False)
    assert rule(1.0, []) == 1.0
    assert rule(1.0, [good]) == pytest.approx(1.0 + 0.2 * 1.5)
    assert rule(1.0, [good, bad]) == pytest.approx(1.0 + 0.2 * (1.5 - 1.0) / 2)
    assert rule(1.0, [good, bad, bad]) == pytest.approx(1.0 - 0.2)
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
    starts = [EpisodeSpec(group=group, member=0, seed=group) for group in range(6)]
    return proxy.rollout(
        TransformersEngine(PolicyModule(bundle)), starts, seed_key=(0,), greedy=greedy
    )


def test_each_turn_is_scored_at_the_temperature_it_was_sampled_at(lm) -> None:
    rule = AdaptiveTemperature(beta=0.4, low=0.5, high=1.4)
    trajectories = played(lm, rule)
    told = [[turn.temperature for turn in one.turns] for one in trajectories]
    for one, temperatures in zip(trajectories, told, strict=True):
        assert temperatures == [rule(0.9, one.turns[:number]) for number in range(len(one.turns))]
    assert len({temperature for one in told for temperature in one}) > 1
    samples = collate(trajectories, lm).samples
    with torch.no_grad():
        found = PolicyModule(lm)(samples, torch.zeros(0)).logprobs
    on = samples.turn >= 0
    assert (found - samples.behavior_logprobs)[on].abs().max() < 2e-5
    samples.temperature = torch.full_like(samples.temperature, 0.9)
    with torch.no_grad():
        wrong = PolicyModule(lm)(samples, torch.zeros(0)).logprobs
    assert (wrong - samples.behavior_logprobs)[on].abs().max() > 1e-2


def test_without_a_weight_nothing_changes(lm) -> None:
    plain, still = played(lm, None), played(lm, AdaptiveTemperature(beta=0.0))
    for ours, theirs in zip(plain, still, strict=True):
        assert [turn.temperature for turn in theirs.turns] == [0.9] * len(theirs.turns)
        for one, other in zip(ours.turns, theirs.turns, strict=True):
            assert one.response_ids.tolist() == other.response_ids.tolist()
            assert one.response_logprobs.tolist() == other.response_logprobs.tolist()


def test_greedy_play_has_no_temperature(lm) -> None:
    rule = AdaptiveTemperature(beta=0.4)
    assert {turn.temperature for one in played(lm, rule, greedy=True) for turn in one.turns} == {
        1.0
    }


@pytest.mark.parametrize("wrong", [{"low": 0.0}, {"low": 2.0}, {"window": 0}])
def test_wrong_settings_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match="adaptive_temperature"):
        AdaptiveTemperature(**wrong)
