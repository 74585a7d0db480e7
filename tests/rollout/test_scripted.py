"""Scripted policies as responders."""

import numpy as np
import pytest
from support.episodes.trajectories import starts

from envs.policies import NoisyPolicy, OptimalPolicy, RandomPolicy, SeveralActions
from envs.trivial_policies import NoAnswer
from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.environments.manager import EnvironmentManager
from ragen_pl.prompts.context import ContextManager
from ragen_pl.prompts.conversation import TextContext
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.rollout.scripted import ScriptedResponder
from ragen_pl.trajectory import EpisodeStatus

SPECS = starts(20)


def play(context, policy, *, target="ragen/FrozenLake-v0", seed=0, **settings):
    proxy = AgentProxy(
        environments=EnvironmentManager(target=target, max_turns=20), context=context, **settings
    )
    return proxy.rollout(ScriptedResponder(policy=policy), SPECS, seed_key=(seed, "player"))


@pytest.mark.parametrize("target", ["ragen/FrozenLake-v0", "ragen/Sokoban-v0"])
def test_optimal_policy_solves_every_episode_in_the_fewest_turns(lm, target):
    episodes = play(ContextManager(lm), OptimalPolicy(), target=target)
    assert all(
        episode.success and episode.status is EpisodeStatus.TERMINATED for episode in episodes
    )
    if target == "ragen/FrozenLake-v0":
        assert [len(episode.turns) for episode in episodes] == [e.difficulty for e in episodes]


def test_demonstration_has_the_tokens_that_a_model_would_write(lm):
    (episode, *_) = play(ContextManager(lm), OptimalPolicy(), temperature=0.5)
    for turn in episode.turns:
        (action,) = turn.actions
        description = turn.state_description
        assert turn.response_text == f"<think>{description}</think><answer>{action}</answer>"
        assert turn.action_is_valid and not turn.hit_length_limit and turn.think == description
        assert lm.tokenizer.decode(turn.response_ids) == turn.response_text + "<|end|>"
        assert turn.response_ids[-1] == lm.end_of_turn_id
        assert not np.isin(turn.response_ids, lm.banned_token_ids).any()
        assert (turn.response_logprobs == 0).all() and turn.temperature == 1.0


class Tired(OptimalPolicy):
    """Raises in its third turn."""

    def act(self, env, rng):
        if env.unwrapped.difficulty() < 2:
            raise LookupError("no more")
        return super().act(env, rng)


def test_a_policy_that_raises_fails_its_own_episode(lm):
    sound = play(ContextManager(lm), OptimalPolicy())
    episodes = play(ContextManager(lm), Tired())
    failed = [episode.status is EpisodeStatus.FAILED for episode in episodes]
    assert failed == [True] * len(SPECS)
    for episode, other in zip(episodes, sound, strict=True):
        assert episode.error == "Tired: no more"
        assert len(episode.turns) == len(other.turns) - 1


@pytest.mark.parametrize("prompt_format", list(PromptFormat))
def test_a_policy_without_an_answer_pays_the_format_penalty_in_every_format(lm, prompt_format):
    environments = EnvironmentManager(target="ragen/FrozenLake-v0", prompt_format=prompt_format)
    context = ContextManager(lm)
    proxy = AgentProxy(environments=environments, context=context, max_response_tokens=1000)
    for episode in proxy.rollout(ScriptedResponder(policy=NoAnswer()), SPECS, seed_key=("none",)):
        assert episode.error is None and episode.reward == pytest.approx(-0.05)
        assert not episode.turns[0].action_is_valid


@pytest.mark.parametrize("target", ["ragen/FrozenLake-v0", "ragen/Sokoban-v0"])
@pytest.mark.parametrize("prompt_format", ["free_think", "grounding_worldmodeling"])
def test_several_actions_of_a_response_are_those_of_as_many_turns(lm, target, prompt_format):
    def played(policy, most):
        environments = EnvironmentManager(
            target=target, max_turns=40, max_actions_per_turn=most, prompt_format=prompt_format
        )
        proxy = AgentProxy(
            environments=environments, context=ContextManager(lm), max_response_tokens=1000
        )
        return proxy.rollout(ScriptedResponder(policy=policy), SPECS, seed_key=("several",))

    def block(name, turn):
        return turn.response_text.partition(f"<{name}>")[2].partition(f"</{name}>")[0]

    single = played(OptimalPolicy(), 1)
    several = played(SeveralActions(policy=OptimalPolicy(), most=3), 3)
    for one, other in zip(single, several, strict=True):
        actions = [action for turn in other.turns for action in turn.actions]
        assert other.success and other.error is None
        # another shortest way may have been drawn
        assert len(actions) == len(one.turns)
        if prompt_format == "grounding_worldmodeling":
            # the next turn sees the state that a turn foresees
            for turn, following in zip(other.turns, other.turns[1:], strict=False):
                assert block("prediction", turn) == block("observation", following) != ""
    counts = {len(turn.actions) for episode in several for turn in episode.turns}
    assert counts == {1, 2, 3}


def test_random_draws_depend_on_the_seeds_alone(lm):
    def actions(policy, **settings):
        episodes = play(ContextManager(lm), policy, seed=4, **settings)
        return [[turn.actions for turn in episode.turns] for episode in episodes]

    noisy = actions(NoisyPolicy())
    assert noisy == actions(NoisyPolicy()) == actions(NoisyPolicy(), num_envs=3)
    assert noisy != actions(RandomPolicy())


def test_episode_without_a_tokenizer_is_the_same(lm):
    with_tokens = play(ContextManager(lm, system_prompt=None), NoisyPolicy())
    without = play(TextContext(), NoisyPolicy())
    for episode, other in zip(with_tokens, without, strict=True):
        assert episode.reward == other.reward and episode.status == other.status
        for turn, text_turn in zip(episode.turns, other.turns, strict=True):
            assert turn.response_text == text_turn.response_text
            assert turn.actions == text_turn.actions and len(text_turn.prompt_ids) == 0
            assert len(text_turn.spans) == len(text_turn.response_text) + 1
