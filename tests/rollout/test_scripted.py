"""Scripted policies in the policy's seat."""

import numpy as np
import pytest

from envs.policies import NoisyPolicy, OptimalPolicy, RandomPolicy
from ragen_pl.rollout.context import ContextManager
from ragen_pl.rollout.environments import EnvironmentManager, EpisodeSpec
from ragen_pl.rollout.scripted import ScriptedProxy
from ragen_pl.trajectory import EpisodeStatus

STARTS = [EpisodeSpec(group=n, member=0, seed=n) for n in range(20)]


def proxy_of(bundle, scripted_policy, target="ragen/FrozenLake-v0", **settings) -> ScriptedProxy:
    return ScriptedProxy(
        environments=EnvironmentManager(target=target, max_turns=20),
        context=ContextManager(bundle),
        scripted_policy=scripted_policy,
        **settings,
    )


@pytest.mark.parametrize("target", ["ragen/FrozenLake-v0", "ragen/Sokoban-v0"])
def test_the_optimal_player_solves_every_start_in_the_fewest_turns(lm, target):
    episodes = proxy_of(lm, OptimalPolicy(), target).play(STARTS, seed_key=(0, "player"))
    assert all(
        episode.success and episode.status is EpisodeStatus.TERMINATED for episode in episodes
    )
    if target == "ragen/FrozenLake-v0":
        assert [len(episode.turns) for episode in episodes] == [e.difficulty for e in episodes]


def test_a_demonstration_is_what_the_policy_would_write(lm):
    (episode, *_) = proxy_of(lm, OptimalPolicy()).play(STARTS, seed_key=(0, "player"))
    for turn in episode.turns:
        (action,) = turn.actions
        assert turn.response_text == f"<think>{turn.info['truth']}</think><answer>{action}</answer>"
        assert (
            turn.action_is_valid and not turn.hit_length_limit and turn.think == turn.info["truth"]
        )
        assert lm.tokenizer.decode(turn.response_ids) == turn.response_text + "<|end|>"
        assert turn.response_ids[-1] == lm.end_of_turn_id
        assert not np.isin(turn.response_ids, lm.banned_token_ids).any()
        assert (turn.response_logprobs == 0).all() and turn.temperature == 1.0


def test_a_players_draws_come_from_its_seeds_alone(lm):
    def actions(scripted_policy, **settings):
        played = proxy_of(lm, scripted_policy, **settings).play(STARTS, seed_key=(4, "player"))
        return [[turn.actions for turn in episode.turns] for episode in played]

    whole = actions(NoisyPolicy())
    assert whole == actions(NoisyPolicy()) == actions(NoisyPolicy(), num_envs=3)
    assert whole != actions(RandomPolicy())
