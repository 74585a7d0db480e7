"""Exploitability from records of Kuhn poker."""

import sys

import pytest

from benchmarks.kuhn import counted_actions, estimated_exploitability
from envs.kuhn_poker import equilibrium, exploitability, information_sets
from envs.policies import OptimalPolicy, RandomPolicy
from envs.trivial_policies import Constant, NoAnswer
from ragen_pl.base.records import to_record
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.prompts.conversation import TextContext
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder


def records_of(policy, *, games=900):
    proxy = AgentProxy(
        environments=EnvironmentManager(
            target="ragen_pl.envs.kuhn_poker.KuhnPoker", max_turns=2, kwargs={"opponent": "random"}
        ),
        context=TextContext(),
        max_response_tokens=sys.maxsize,
    )
    specs = [EpisodeSpec(group=n, member=0, seed=n, options={"seat": n % 2}) for n in range(games)]
    played = proxy.rollout(ScriptedResponder(policy=policy), specs, seed_key=(0, "player"))
    return [to_record(one) for one in played]


def test_shares_of_bet_are_those_of_the_policy_that_played():
    counts = counted_actions(records_of(OptimalPolicy()))
    bet = equilibrium()
    assert set(counts) == set(information_sets())
    for one, (passes, bets, invalid) in counts.items():
        assert invalid == 0
        total = passes + bets
        deviation = (bet[one] * (1 - bet[one]) / total) ** 0.5
        assert total > 20 and abs(bets / total - bet[one]) <= 4 * deviation
    value, low, high = estimated_exploitability(counts)
    assert 0 <= low <= high and value < 0.1


@pytest.mark.parametrize(
    ("policy", "share"), [(RandomPolicy(), 0.5), (Constant(action="Bet"), 1.0)]
)
def test_exploitability_is_that_of_the_strategy(policy, share):
    counts = counted_actions(records_of(policy))
    value, low, high = estimated_exploitability(counts)
    exact = exploitability(dict.fromkeys(information_sets(), share))
    # who always bets never answers a bet after Pass, and that set changes nothing
    assert value == pytest.approx(exact, abs=0.08) and low - 0.02 <= exact <= high
    assert (sum(counts[1, "pb"]) == 0) is (share == 1.0)


def test_a_response_without_an_action_gives_up_the_pot():
    counts = counted_actions(records_of(NoAnswer(), games=100))
    assert sum(numbers[2] for numbers in counts.values()) == 100
    # the other player wins the pot of each game
    assert estimated_exploitability(counts) == (1.0, 1.0, 1.0)


def test_records_of_another_game_are_refused():
    record = {"turns": [{"observation": "1 2 3"}]}
    with pytest.raises(ValueError, match="expected an observation of Kuhn poker, found '1 2 3'"):
        counted_actions([record])
