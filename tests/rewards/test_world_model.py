"""Statements on the environment's state: read by rule, held against the truth, worth nothing where they ignore it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.policies import RandomPolicy
from ragen_pl.data.collate import collate
from ragen_pl.rewards.world_model import RelationJudge, WorldModelReward
from ragen_pl.rollout.context import ContextManager
from ragen_pl.rollout.environments import EnvironmentManager, EpisodeSpec
from ragen_pl.rollout.formats import PromptFormat, format_response
from ragen_pl.rollout.relations import f1, read, tell, truth
from ragen_pl.rollout.scripted import ScriptedProxy
from ragen_pl.trajectory import Statement

LAKE, ROOM = "ragen/FrozenLake-v0", "ragen/Sokoban-v0"
BOTH = PromptFormat.GROUNDING_WORLDMODELING
NAMES = ("goal", "hole")
STARTS = [EpisodeSpec(group=n, member=0, seed=n) for n in range(60)]


def alone(part):
    return [part]


def demonstrations(bundle, target=LAKE, how=BOTH, starts=STARTS, **settings):
    proxy = ScriptedProxy(
        environments=EnvironmentManager(target=target, max_turns=4, prompt_format=how, **settings),
        context=ContextManager(bundle, system_prompt=None),
        max_response_tokens=256,
        scripted_policy=RandomPolicy(),
    )
    return proxy.play(starts, seed_key=(0, "player"))


@pytest.mark.parametrize(
    ("text", "same_as"),
    [
        ("goal Down Left", [("goal", 2, -1)]),
        ("The goal is below me and to the left of me.", [("goal", 1, -3)]),
        ("goal: south-west; holes: above", [("goal", 1, -1), ("hole", -1, 0)]),
        ("goal here", [("goal", 0, 0)]),
        ("hole Up hole Up Left", [("hole", -1, 0), ("hole", -2, -2)]),
        ("Up Left", []),
        ("", []),
        ("<|end|> \x00 ünïcode 42", []),
    ],
)
def test_what_a_statement_claims(text, same_as):
    assert read(text, NAMES) == truth(same_as)


def test_agreement_by_hand():
    true = truth([("goal", 1, -1), ("hole", -1, 0)])  # four claims
    assert f1(read("goal Down Left hole Up", NAMES), true) == 1.0
    assert f1(read("goal Down Left", NAMES), true) == 2 * 2 / (2 + 4)
    assert f1(read("goal Down Right hole Up", NAMES), true) == 2 * 3 / (4 + 4)
    assert f1(read("goal Up Down Left", NAMES), true) == 2 * 1 / (2 + 4)  # both ways is no way
    assert f1(read("goal Down Left " * 3, NAMES), true) == 2 * 2 / (6 + 4)  # said thrice, true once
    assert f1(read("nothing", NAMES), true) == 0.0


offsets = st.integers(-3, 3)
states = st.lists(st.tuples(st.sampled_from(NAMES), offsets, offsets), min_size=1, max_size=5)


@given(states)
def test_what_is_told_is_read_back_wholly_true(state):
    assert f1(read(tell(state), NAMES), truth(state)) == 1.0


@given(st.lists(states, min_size=1, max_size=12), states)
def test_a_constant_statement_earns_exactly_nothing_whatever_the_states(truths, claimed):
    statements = [
        Statement(part="observation", text=tell(claimed), truth=t, names=NAMES, agreement=0.0)
        for t in truths
    ]
    scores = RelationJudge()(statements, references=truths)
    assert sum(scores) == pytest.approx(0.0, abs=1e-9)
    assert all(-4.0 <= score <= 1.0 + 1e-9 for score in scores)


def test_scores_by_hand():
    """Two states, one left and one right: a claim of left agrees by 1 and by 1/2, by chance 3/4."""
    left, right = [("goal", 0, -1)], [("goal", 0, 1)]
    said = [("goal Left", left), ("goal Left", right), ("goal Right", right), ("", left)]
    statements = [
        Statement(part="observation", text=t, truth=s, names=NAMES, agreement=0.0) for t, s in said
    ]
    scores = RelationJudge()(statements, references=[left, right])
    assert scores == pytest.approx([1.0, -1.0, 1.0, 0.0])


@pytest.mark.parametrize("target", [LAKE, ROOM])
def test_constant_responses_earn_nothing_and_true_ones_all_in_real_environments(play, lm, target):
    reward = WorldModelReward(grounding_weight=0.5, worldmodeling_weight=0.25)
    things = "goal Down Right hole Up" if target == LAKE else "box Up target Down Left"
    blocks = {"observation": things, "prediction": things}
    played, _ = play(
        target, STARTS, lambda slot, turn: format_response(BOTH, "Down", blocks=blocks),
        prompt_format=BOTH, max_turns=3, response_tokens=256,
    )  # fmt: skip
    plain = [turn.reward for one in played for turn in one.turns]
    reward.settle(played, gather=alone)
    turns = [turn for one in played for turn in one.turns]
    assert sum(turn.reward for turn in turns) == pytest.approx(sum(plain), abs=1e-9)
    assert np.std([turn.reward_terms["state_estimation"] for turn in turns]) > 0.05
    told = demonstrations(lm, target)
    reward.settle(told, gather=alone)
    for turn in (turn for one in told for turn in one.turns):
        assert [one.agreement for one in turn.statements] == [1.0, 1.0]
        parts = turn.reward_terms
        assert (parts["state_estimation"], parts["transition_prediction"]) == pytest.approx(
            (0.5, 0.25)
        )
        assert turn.reward == pytest.approx(sum(parts.values()))


def test_observations_are_held_against_the_state_before_and_predictions_against_the_one_after(play):
    layout = {"layout": ["SFG", "FFF", "FFF"]}
    blocks = {"observation": "goal Right", "prediction": "goal here"}
    (one,), _ = play(
        LAKE, [EpisodeSpec(group=0, member=0, seed=0, options=layout)],
        lambda slot, turn: format_response(BOTH, "Right || Right", blocks=blocks),
        kwargs={"size": 3}, prompt_format=BOTH, max_actions_per_turn=2, response_tokens=256,
    )  # fmt: skip
    (turn,) = one.turns
    assert [(s.part, s.truth, s.agreement) for s in turn.statements] == [
        ("observation", [("goal", 0, 2)], 1.0),
        ("prediction", [("goal", 0, 0)], 1.0),
    ]
    assert turn.reward_terms == {"environment": 1.0} and one.success


def test_the_reward_reaches_the_batch_and_split_over_ranks_stays_the_same(lm):
    reward = WorldModelReward(grounding_weight=1.0)
    whole, halves = demonstrations(lm), demonstrations(lm)
    for one in whole + halves:  # some are wrong
        if one.group % 3 == 0:
            one.turns[0].statements[0].text = "goal Up Left"
    reward.settle(whole, gather=alone)
    truths = [
        s.truth
        for one in halves
        for t in one.turns
        for s in t.statements
        if s.part == "observation"
    ]
    reward.settle(halves[:20], gather=lambda mine: [mine, truths[len(mine) :]])
    for a, b in zip(whole[:20], halves[:20], strict=True):
        assert [turn.reward for turn in a.turns] == [turn.reward for turn in b.turns]
    assert any(turn.reward < 0 for one in whole for turn in one.turns)
    rewards = collate(whole, lm).episodes.turn_rewards
    assert rewards[0, 0] == pytest.approx(whole[0].turns[0].reward)


def test_a_response_without_the_form_has_no_statements(play):
    (one,), _ = play(
        LAKE,
        STARTS[:1],
        lambda slot, turn: "<think>x</think><answer>Up</answer>",
        prompt_format=BOTH,
    )
    WorldModelReward(grounding_weight=1.0).settle([one], gather=alone)
    assert one.turns[0].statements == [] and one.turns[0].reward_terms == {"format": -0.05}


def test_a_judge_of_ones_own_stands_behind_the_same_call(lm):
    def strict(statements, *, references):
        assert len(references) == len(statements)
        return [float(one.text == tell(one.truth)) for one in statements]

    told = demonstrations(lm, starts=STARTS[:3])
    WorldModelReward(worldmodeling_weight=2.0, judge=strict).settle(told, gather=alone)
    assert told[0].turns[0].reward_terms["transition_prediction"] == 2.0


@pytest.mark.parametrize("how", list(PromptFormat))
@pytest.mark.parametrize("target", [LAKE, ROOM, "ragen/Bandit-v0", "ragen/FrozenLakeVisual-v0"])
def test_demonstrations_have_the_form_of_every_format(lm, vlm, how, target):
    bundle = vlm if "Visual" in target else lm
    for one in demonstrations(bundle, target, how, STARTS[:4]):
        for turn in one.turns:
            assert turn.action_is_valid
            assert turn.think == (None if how is PromptFormat.NO_THINK else turn.info["truth"])


def test_a_demonstrated_prediction_is_no_oracle_of_a_slip_and_leaves_the_environment_alone(lm):
    slippery = {"slip_probability": 1.0}
    told = demonstrations(lm, kwargs=slippery)
    right = [turn.statements[1].agreement == 1.0 for one in told for turn in one.turns]
    assert 0.2 < np.mean(right) < 0.9
    free = demonstrations(lm, how=PromptFormat.FREE_THINK, kwargs=slippery)
    assert [[t.info["truth"] for t in one.turns] for one in told] == [
        [t.info["truth"] for t in one.turns] for one in free
    ]


def test_a_demonstration_longer_than_a_response_may_be_is_refused(lm):
    proxy = ScriptedProxy(
        environments=EnvironmentManager(target=LAKE, prompt_format=BOTH),
        context=ContextManager(lm), max_response_tokens=24, scripted_policy=RandomPolicy(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="max_response_tokens=24; raise it"):
        proxy.play(STARTS[:1], seed_key=(0,))
