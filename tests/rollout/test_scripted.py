"""Scripted players in the policy's seat."""

import numpy as np
import pytest

from envs.players import NoisyPlayer, OptimalPlayer, RandomPlayer
from ragen_pl.rollout.context import ContextManager
from ragen_pl.rollout.environments import EnvironmentManager, Start
from ragen_pl.rollout.scripted import ScriptedProxy
from ragen_pl.trajectory import Ending

STARTS = [Start(group=n, member=0, seed=n) for n in range(20)]


def proxy_of(bundle, player, target="ragen/FrozenLake-v0", **settings) -> ScriptedProxy:
    return ScriptedProxy(
        environments=EnvironmentManager(target=target, max_turns=20),
        context=ContextManager(bundle),
        player=player,
        **settings,
    )


@pytest.mark.parametrize("target", ["ragen/FrozenLake-v0", "ragen/Sokoban-v0"])
def test_the_optimal_player_solves_every_start_in_the_fewest_turns(lm, target):
    episodes = proxy_of(lm, OptimalPlayer(), target).play(STARTS, seed_key=(0, "player"))
    assert all(episode.success and episode.ending is Ending.TERMINATED for episode in episodes)
    if target == "ragen/FrozenLake-v0":
        assert [len(episode.turns) for episode in episodes] == [e.difficulty for e in episodes]


def test_a_demonstration_is_what_the_policy_would_write(lm):
    (episode, *_) = proxy_of(lm, OptimalPlayer()).play(STARTS, seed_key=(0, "player"))
    for turn in episode.turns:
        (action,) = turn.actions
        assert turn.reply_text == f"<think>{turn.info['truth']}</think><answer>{action}</answer>"
        assert turn.action_is_valid and not turn.cut and turn.think == turn.info["truth"]
        assert lm.tokenizer.decode(turn.reply_ids) == turn.reply_text + "<|end|>"
        assert turn.reply_ids[-1] == lm.end_of_turn_id
        assert not np.isin(turn.reply_ids, lm.banned_token_ids).any()
        assert (turn.reply_logprobs == 0).all() and turn.temperature == 1.0


def test_a_players_draws_come_from_its_seeds_alone(lm):
    def actions(player, **settings):
        played = proxy_of(lm, player, **settings).play(STARTS, seed_key=(4, "player"))
        return [[turn.actions for turn in episode.turns] for episode in played]

    whole = actions(NoisyPlayer())
    assert whole == actions(NoisyPlayer()) == actions(NoisyPlayer(), max_lanes=3)
    assert whole != actions(RandomPlayer())
