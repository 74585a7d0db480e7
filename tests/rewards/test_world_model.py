"""World-model rewards: claims of statements, chance correction, demonstrations in each format."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.episodes.trajectories import starts

from envs.policies import RandomPolicy
from ragen_pl.base.prompt_formats import PromptFormat, format_response
from ragen_pl.data.collate import collate
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.spatial_relations import (
    f1_score,
    read_claims,
    relations_text,
    true_claims,
)
from ragen_pl.rewards.world_model import RelationJudge, WorldModelReward
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.trajectory import Statement

FROZEN_LAKE, SOKOBAN = "ragen/FrozenLake-v0", "ragen/Sokoban-v0"
BOTH = PromptFormat.GROUNDING_WORLDMODELING
NAMES = ("goal", "hole")
SPECS = starts(60)


def one_rank(values):
    return [values]


def turns_of(trajectories):
    return [turn for trajectory in trajectories for turn in trajectory.turns]


def demonstrations(bundle, target=FROZEN_LAKE, prompt_format=BOTH, specs=SPECS, **settings):
    proxy = AgentProxy(
        environments=EnvironmentManager(
            target=target, max_turns=4, prompt_format=prompt_format, **settings
        ),
        context=ContextManager(bundle, system_prompt=None),
        max_response_tokens=256,
    )
    responder = ScriptedResponder(policy=RandomPolicy())
    return proxy.rollout(responder, specs, seed_key=(0, "player"))


def statement(text, relations):
    return Statement(
        block="observation", text=text, true_relations=relations, names=NAMES, agreement=0.0
    )


# ---- claims


@pytest.mark.parametrize(
    ("text", "relations"),
    [
        ("goal Down Left", [("goal", 2, -1)]),
        ("The goal is below me and to the left of me.", [("goal", 1, -3)]),
        ("goal: south-west; holes: above", [("goal", 1, -1), ("hole", -1, 0)]),
        ("goal here", [("goal", 0, 0)]),
        ("hole Up hole Up Left", [("hole", -1, 0), ("hole", -2, -2)]),
        # no plural of a thing
        ("goal Up, a goalie Left", [("goal", -1, -1)]),
        ("Up Left", []),
        ("", []),
        ("<|end|> \x00 ünïcode 42", []),
    ],
)
def test_claims_of_a_statement(text, relations):
    assert read_claims(text, NAMES) == true_claims(relations)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("red key", "key"), "The red  keys are below, and the key is up. A red\nkeyring is left."),
        (("box_1", "box_12", "box"), "box_12 Left box-1 Down box 3 Up"),
        (("Glass", "Glasses"), "glasses Left glass Right"),
        (("🔑", "l'épée (d'or)"), "🔑 Left, L'ÉPÉE (d'or) Up"),
        (("", "_"), "nothing Up _ Left"),
    ],
)
def test_names_may_have_several_words_numbers_and_signs(names, text):
    expected = {
        "red key": [("red key", 1, 0), ("key", -1, -1)],
        "box_1": [("box_12", 0, -1), ("box_1", 1, 0), ("box", -1, 0)],
        "Glass": [("Glasses", 0, -1), ("Glass", 0, 1)],
        "🔑": [("🔑", 0, -1), ("l'épée (d'or)", -1, 0)],
        "": [],
    }
    assert read_claims(text, names) == true_claims(expected[names[0]])


def test_f1_with_hand_computed_values():
    # four claims
    target = true_claims([("goal", 1, -1), ("hole", -1, 0)])

    def score(text):
        return f1_score(read_claims(text, NAMES), target)

    assert score("goal Down Left hole Up") == 1.0
    assert score("goal Down Left") == 2 * 2 / (2 + 4)
    assert score("goal Down Right hole Up") == 2 * 3 / (4 + 4)
    # opposite directions contradict each other
    assert score("goal Up Down Left") == 2 * 1 / (2 + 4)
    # claimed three times, true once
    assert score("goal Down Left " * 3) == 2 * 2 / (6 + 4)
    assert score("nothing") == 0.0


offsets = st.integers(-3, 3)
states = st.lists(st.tuples(st.sampled_from(NAMES), offsets, offsets), min_size=1, max_size=5)


@given(states)
def test_relations_in_words_are_read_back(state):
    assert f1_score(read_claims(relations_text(state), NAMES), true_claims(state)) == 1.0


# ---- judge


@given(st.lists(states, min_size=1, max_size=12), states)
def test_constant_statement_scores_zero_on_any_states(references, claimed):
    statements = [statement(relations_text(claimed), relations) for relations in references]
    scores = RelationJudge()(statements, references=references)
    assert sum(scores) == pytest.approx(0.0, abs=1e-9)
    assert all(-4.0 <= score <= 1.0 + 1e-9 for score in scores)


def test_scores_with_hand_computed_values():
    """Two states, left and right: a claim of left agrees by 1 and by 1/2, by chance 3/4."""
    left, right = [("goal", 0, -1)], [("goal", 0, 1)]
    texts = [("goal Left", left), ("goal Left", right), ("goal Right", right), ("", left)]
    statements = [statement(text, relations) for text, relations in texts]
    scores = RelationJudge()(statements, references=[left, right])
    assert scores == pytest.approx([1.0, -1.0, 1.0, 0.0])


# ---- reward


@pytest.mark.parametrize("target", [FROZEN_LAKE, SOKOBAN])
def test_constant_responses_earn_nothing_and_true_ones_everything(play, lm, target):
    reward = WorldModelReward(grounding_weight=0.5, worldmodeling_weight=0.25)
    claims = "goal Down Right hole Up" if target == FROZEN_LAKE else "box Up target Down Left"
    text = format_response(BOTH, "Down", blocks={"observation": claims, "prediction": claims})
    turns = turns_of(trajectories := play(target, SPECS, text, prompt_format=BOTH, max_turns=3))
    before = sum(turn.reward for turn in turns)
    reward(trajectories, gather=one_rank)
    assert sum(turn.reward for turn in turns) == pytest.approx(before, abs=1e-9)
    assert np.std([turn.reward_terms["state_estimation"] for turn in turns]) > 0.05
    demonstrated = demonstrations(lm, target)
    reward(demonstrated, gather=one_rank)
    for turn in turns_of(demonstrated):
        assert [statement.agreement for statement in turn.statements] == [1.0, 1.0]
        terms = turn.reward_terms
        assert terms["state_estimation"] == pytest.approx(0.5)
        assert terms["transition_prediction"] == pytest.approx(0.25)
        assert turn.reward == pytest.approx(sum(terms.values()))


def test_observation_is_of_the_state_before_and_prediction_of_the_one_after(play):
    layout = {"layout": ["SFG", "FFF", "FFF"]}
    blocks = {"observation": "goal Right", "prediction": "goal here"}
    (episode,) = play(
        FROZEN_LAKE,
        [EpisodeSpec(group=0, member=0, seed=0, options=layout)],
        format_response(BOTH, "Right || Right", blocks=blocks),
        kwargs={"size": 3},
        prompt_format=BOTH,
        max_actions_per_turn=2,
    )
    (turn,) = episode.turns
    assert [(s.block, s.true_relations, s.agreement) for s in turn.statements] == [
        ("observation", [("goal", 0, 2)], 1.0),
        ("prediction", [("goal", 0, 0)], 1.0),
    ]
    assert turn.reward_terms == {"environment": 1.0} and episode.success


def test_reward_reaches_the_batch_and_does_not_depend_on_ranks(lm):
    reward = WorldModelReward(grounding_weight=1.0)
    single, split = demonstrations(lm), demonstrations(lm)
    # some statements are wrong
    for episode in single + split:
        if episode.group % 3 == 0:
            episode.turns[0].statements[0].text = "goal Up Left"
    reward(single, gather=one_rank)
    references = [
        statement.true_relations
        for turn in turns_of(split)
        for statement in turn.statements
        if statement.block == "observation"
    ]
    reward(split[:20], gather=lambda local: [local, references[len(local) :]])
    for episode, other in zip(single[:20], split[:20], strict=True):
        assert [turn.reward for turn in episode.turns] == [turn.reward for turn in other.turns]
    assert any(turn.reward < 0 for turn in turns_of(single))
    rewards = collate(single, lm).episodes.turn_rewards
    assert rewards[0, 0] == pytest.approx(single[0].turns[0].reward)


def test_response_without_the_form_has_no_statements(play):
    text = "<think>x</think><answer>Up</answer>"
    (episode,) = play(FROZEN_LAKE, SPECS[:1], text, prompt_format=BOTH)
    WorldModelReward(grounding_weight=1.0)([episode], gather=one_rank)
    (turn,) = episode.turns
    assert turn.statements == [] and turn.reward_terms == {"format": -0.05}


def test_custom_judge_scores_the_statements(lm):
    def strict(statements, *, references):
        assert len(references) == len(statements)
        return [float(s.text == relations_text(s.true_relations)) for s in statements]

    trajectories = demonstrations(lm, specs=SPECS[:3])
    WorldModelReward(worldmodeling_weight=2.0, judge=strict)(trajectories, gather=one_rank)
    assert trajectories[0].turns[0].reward_terms["transition_prediction"] == 2.0


# ---- demonstrations


@pytest.mark.parametrize("prompt_format", list(PromptFormat))
@pytest.mark.parametrize(
    "target", [FROZEN_LAKE, SOKOBAN, "ragen/Bandit-v0", "ragen/FrozenLakeVisual-v0"]
)
def test_demonstrations_have_the_form_of_each_format(lm, vlm, prompt_format, target):
    bundle = vlm if "Visual" in target else lm
    for turn in turns_of(demonstrations(bundle, target, prompt_format, SPECS[:4])):
        assert turn.action_is_valid
        expected = None if prompt_format is PromptFormat.NO_THINK else turn.state_description
        assert turn.think == expected


def test_demonstrated_prediction_foresees_no_slip_and_leaves_the_environment_unchanged(lm):
    slippery = {"slip_probability": 1.0}
    trajectories = demonstrations(lm, kwargs=slippery)
    correct = [turn.statements[1].agreement == 1.0 for turn in turns_of(trajectories)]
    assert 0.2 < np.mean(correct) < 0.9
    free = demonstrations(lm, prompt_format=PromptFormat.FREE_THINK, kwargs=slippery)
    assert [[t.state_description for t in episode.turns] for episode in trajectories] == [
        [t.state_description for t in episode.turns] for episode in free
    ]


def test_demonstration_beyond_the_response_limit_raises(lm):
    proxy = AgentProxy(
        environments=EnvironmentManager(target=FROZEN_LAKE, prompt_format=BOTH),
        context=ContextManager(lm),
        max_response_tokens=24,
    )
    with pytest.raises(
        ValueError, match=r"max_response_tokens=24: a scripted response .*; raise it"
    ):
        proxy.rollout(ScriptedResponder(policy=RandomPolicy()), SPECS[:1], seed_key=(0,))
