"""A critic's values of the states that an engine samples from: those of the trainer's pass over the samples."""

from dataclasses import replace

import pytest
import torch
from support.episodes.lake_episodes import proxy_of, words
from support.episodes.trajectories import make_request, roll_out, starts
from support.models.compared_logprobs import play, trajectory_of
from support.models.family_models import MODELS, tiny

from ragen_pl.data.collate import collate
from ragen_pl.data.microbatches import split_by_length
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import generate
from ragen_pl.modules.critic import CriticModule, score_together
from ragen_pl.modules.policy import PolicyModule

SETTINGS = {"growing": {}, "static": {"static_step": True, "tokens_per_read": 3}}


def critic_of(bundle):
    torch.manual_seed(0)
    critic = CriticModule(bundle.hidden_size)
    # heads start at 0
    torch.nn.init.normal_(critic.head.layers[-1].weight, std=0.3)
    return critic.eval()


def reading(bundle, critic, **settings):
    engine = TransformersEngine(PolicyModule(bundle).eval(), **settings)
    engine.read_values(critic)
    return engine


def check_values(bundle, critic, trajectories):
    """Compare the values of a batch with those of a pass over it, token by token."""
    batch = collate(trajectories, bundle)
    assert batch.has_values
    samples = batch.samples
    rows = split_by_length(samples.length, 3)
    with torch.no_grad():
        policy = PolicyModule(bundle).eval()
        scores = score_together(policy, critic, samples, batch.images, microbatches=rows)
    assert scores.values[samples.sampled].std() > 0.05
    torch.testing.assert_close(samples.values, scores.values, rtol=1e-5, atol=1e-5)
    return samples


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("window", [1, 2, "all"])
@pytest.mark.parametrize("kind", ["text", "images"])
def test_values_are_those_of_the_trainers_pass(lm, vlm, kind, window, settings):
    """Of rows that are dropped and sessions that go on and end, behind a prefix that all prompts share."""
    bundle = vlm if kind == "images" else lm
    critic, proxy = critic_of(bundle), proxy_of(bundle, window=window, kind=kind)
    engine = reading(bundle, critic, **settings)
    samples = check_values(bundle, critic, roll_out(proxy, engine, starts(8, 2)))
    several = (samples.turn.amax(1) > samples.turn.where(samples.turn >= 0, 99).amin(1)).any()
    assert several == (window != 1)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "smolvlm"])
def test_families(name, settings):
    bundle = tiny(name)
    critic, single = critic_of(bundle), MODELS[name].single_image
    engine = reading(bundle, critic, **settings)
    episodes = play(bundle, window="all", keep=True, single_image=single, engine=engine)
    trajectories = [trajectory_of(episode, number) for number, episode in enumerate(episodes)]
    for trajectory, episode in zip(trajectories, episodes, strict=True):
        trajectory.turns = [
            replace(turn, response_values=said.generation.values)
            for turn, said in zip(trajectory.turns, episode, strict=True)
        ]
    check_values(bundle, critic, trajectories)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_responses_are_the_same_with_values_and_without(lm, settings):
    critic = critic_of(lm)
    requests = [
        make_request(words(lm, "me " * (n % 5 + 1)), session=n, seed=n, tokens=3 + n)
        for n in range(9)
    ]
    engine, plain = reading(lm, critic, **settings), reading(lm, None, **settings)
    pairs = zip(*(generate(each, requests, keep=False) for each in (engine, plain)), strict=True)
    for one, other in pairs:
        assert one.ids.tolist() == other.ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist() and one.entropy == other.entropy
        assert len(one.values) == len(one.ids) and other.values is None
    # a critic may come and go
    for own in (None, critic):
        engine.read_values(own)
        for response in generate(engine, requests, keep=False):
            assert (response.values is None) == (own is None)


def test_a_response_without_values_leaves_its_batch_to_the_pass(lm):
    proxy = proxy_of(lm, window=1)
    trajectories = roll_out(proxy, reading(lm, critic_of(lm)), starts(2, 2))
    trajectories[1].turns[-1].response_values = None
    assert not collate(trajectories, lm).has_values
