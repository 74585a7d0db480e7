"""The in-process engine: its samples and log-probs against plain forward passes."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.episodes.lake_episodes import draws_of, gap, prompt_of, proxy_of, replay, scored, words
from support.episodes.trajectories import make_request, roll_out, starts

from ragen_pl.base.seeding import derive_seed, uniforms
from ragen_pl.data.collate import collate
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import generate
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.modules.policy import PolicyModule


def same(first, second) -> None:
    for episode, other in zip(first, second, strict=True):
        assert (episode.group, episode.member, episode.status) == (
            other.group,
            other.member,
            other.status,
        )
        for a, b in zip(episode.turns, other.turns, strict=True):
            assert a.prompt_ids.tolist() == b.prompt_ids.tolist()
            assert a.response_ids.tolist() == b.response_ids.tolist()
            np.testing.assert_allclose(a.response_logprobs, b.response_logprobs, atol=1e-4)


# ---- against plain forwards


def test_greedy_responses_match_generate(lm):
    engine = TransformersEngine(PolicyModule(lm))
    prompts = [words(lm, text) for text in ("me 1 2", "goal 3 0 avoid Up", "x")]
    requests = [make_request(p, session=n, temperature=0.0) for n, p in enumerate(prompts)]
    for prompt, response in zip(prompts, generate(engine, requests, keep=False), strict=True):
        ids = torch.from_numpy(prompt.ids)[None]
        expected = lm.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
            suppress_tokens=list(lm.banned_token_ids), pad_token_id=lm.pad_token_id,
        )  # fmt: skip
        assert response.ids.tolist() == expected[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", ["text", "images"])
@pytest.mark.parametrize("window", [1, 2, "all"])
def test_sampled_tokens_and_logprobs_match_a_fresh_forward(lm, vlm, kind, window):
    bundle = vlm if kind == "images" else lm
    proxy = proxy_of(bundle, window=window, kind=kind, temperature=0.8)
    episodes = roll_out(
        proxy, TransformersEngine(PolicyModule(bundle)), starts(3, 2), seed_key=(5, "sample")
    )
    lengths = {len(turn.response_ids) for episode in episodes for turn in episode.turns}
    assert len(lengths) > 4  # responses end at different tokens
    worst = 0.0
    for episode in episodes[::2]:
        for number, turn in enumerate(episode.turns):
            draws = uniforms(
                derive_seed(5, "sample", episode.group, episode.member, number), count=12
            )
            prompt = prompt_of(turn.prompt_ids, turn.prompt_images)
            ids, logprobs = replay(bundle, prompt, draws, 0.8)
            assert turn.response_ids.tolist() == ids
            worst = max(worst, float(np.abs(turn.response_logprobs - logprobs).max()))
    assert worst < 1e-4


@pytest.mark.parametrize("kind", ["text", "images"])
@pytest.mark.parametrize("window", [1, 2, "all"])
def test_trainer_and_engine_agree_on_logprobs_and_entropy(lm, vlm, kind, window):
    bundle = vlm if kind == "images" else lm
    proxy = proxy_of(bundle, window=window, kind=kind, temperature=0.7)
    episodes = roll_out(
        proxy, TransformersEngine(PolicyModule(bundle)), starts(4, 2), seed_key=(2, "sample")
    )
    batch, scores = scored(bundle, episodes)
    assert int(batch.samples.loss_mask.sum()) == sum(
        len(t.response_ids) for e in episodes for t in e.turns
    )
    assert float(gap(bundle, episodes).max()) < 1e-4
    entropies = [t.response_entropy for e in episodes for t in e.turns]
    assert np.mean(entropies) == pytest.approx(
        np.mean([
            float(scores.entropy[(batch.samples.episode[:, None] == n) & (batch.samples.turn == k)].mean())
            for n, e in enumerate(episodes) for k in range(len(e.turns))
        ]), abs=1e-4,
    )  # fmt: skip


@pytest.mark.parametrize("window", [1, "all"])
def test_additive_masks_match_the_trainer(fresh_lm, window):
    fresh_lm.model.set_attn_implementation("eager")
    proxy = proxy_of(fresh_lm, window=window, turns=3)
    episodes = roll_out(
        proxy, TransformersEngine(PolicyModule(fresh_lm)), starts(4, 2), seed_key=(2, "sample")
    )
    assert float(gap(fresh_lm, episodes).max()) < 1e-4


def test_greedy_logprobs_are_those_at_temperature_1(lm):
    proxy = proxy_of(lm, window=1, temperature=0.5)
    episodes = roll_out(
        proxy, TransformersEngine(PolicyModule(lm)), starts(2, 2), seed_key=(0,), greedy=True
    )
    same(episodes[::2], [replace(episode, member=0) for episode in episodes[1::2]])
    assert float(gap(lm, episodes).max()) < 1e-4


def test_template_that_rewrites_history_trains_on_the_prompts_shown(lm):
    tokenizer = copy.deepcopy(lm.tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content'] is string -%}{{- message['content']",
        "message['content'] is string -%}{{- "
        "message['content'].split('i')[-1] if message['role'] == 'assistant' else message['content']",
    )
    bundle = ModelBundle(lm.model, tokenizer)
    proxy = proxy_of(bundle, window="all")
    assert not proxy.context.joins
    episodes = roll_out(
        proxy, TransformersEngine(PolicyModule(bundle)), starts(6, 2), seed_key=(3,)
    )
    samples = collate(episodes, bundle).samples
    assert len(samples) > 2 * len(episodes)  # most turns break with the one before
    assert float(gap(bundle, episodes).max()) < 1e-4


# ---- independence of slots, order and other requests


@pytest.mark.parametrize("window", [1, "all"])
def test_trajectories_do_not_depend_on_num_envs_or_order(lm, window):
    engine, key = TransformersEngine(PolicyModule(lm)), (1, "sample", 3)
    whole = roll_out(proxy_of(lm, window=window), engine, starts(4, 2), seed_key=key)
    pairs = roll_out(proxy_of(lm, window=window, num_envs=3), engine, starts(4, 2), seed_key=key)
    same(whole, pairs)
    turned = roll_out(proxy_of(lm, window=window), engine, starts(4, 2)[::-1], seed_key=key)
    same(whole, turned[::-1])
    other = roll_out(proxy_of(lm, window=window), engine, starts(4, 2), seed_key=(1, "sample", 4))
    first = [episode.turns[0].response_ids.tolist() for episode in whole]
    assert first != [episode.turns[0].response_ids.tolist() for episode in other]
    assert any(first[n] != first[n + 1] for n in (0, 2, 4, 6))  # members sample for themselves


def test_each_request_has_its_own_temperature_limit_and_seed(lm):
    engine = TransformersEngine(PolicyModule(lm))
    prompt = words(lm, "me 1 2")
    mixed = [
        make_request(prompt, session=0, temperature=0.0),
        make_request(prompt, session=1, temperature=0.5, seed=1),
        make_request(prompt, session=2, temperature=2.0, seed=1, tokens=3),
        make_request(prompt, session=3, temperature=1.0, seed=2),
    ]
    together = generate(engine, mixed, keep=False)
    for single, response in zip(mixed, together, strict=True):
        (alone,) = generate(TransformersEngine(PolicyModule(lm)), [single], keep=False)
        assert (
            response.ids.tolist() == alone.ids.tolist()
            and response.hit_length_limit == alone.hit_length_limit
        )
        np.testing.assert_allclose(response.logprobs, alone.logprobs, atol=1e-5)
    for single, response in zip(mixed[1:], together[1:], strict=True):
        ids, logprobs = replay(lm, prompt, draws_of(single), single.temperature)
        assert response.ids.tolist() == ids
        np.testing.assert_allclose(response.logprobs, logprobs, atol=1e-4)
    assert len(together[2].ids) <= 3


def test_response_hits_its_length_limit_exactly_without_an_end_token(lm):
    engine = TransformersEngine(PolicyModule(lm))
    requests = [
        make_request(words(lm, "go"), session=n, seed=n, tokens=3 + n % 5) for n in range(40)
    ]
    responses = generate(engine, requests, keep=False)
    for single, response in zip(requests, responses, strict=True):
        ended = int(response.ids[-1]) in lm.eos_token_ids
        assert response.hit_length_limit == (not ended)
        assert not any(int(token) in lm.eos_token_ids for token in response.ids[:-1])
        assert ended or len(response.ids) == single.max_tokens
        assert len(response.logprobs) == len(response.ids)
    assert {response.hit_length_limit for response in responses} == {True, False}


def test_banned_tokens_are_never_sampled(fresh_vlm):
    bundle = fresh_vlm
    slot, banned = bundle.image_token_id, bundle.banned_token_ids
    assert slot in banned and bundle.pad_token_id in banned and bundle.end_of_turn_id not in banned
    with torch.no_grad():  # tied to the head: the banned rows now win by far
        bundle.model.get_output_embeddings().weight[list(banned)] = 5.0
        bundle.model.model.language_model.norm.bias = torch.nn.Parameter(torch.zeros(32))
    requests = [
        make_request(words(bundle, "go"), session=n, seed=n, temperature=float(n > 0))
        for n in range(64)
    ]
    responses = generate(TransformersEngine(PolicyModule(bundle)), requests, keep=False)
    assert not {int(token) for response in responses for token in response.ids} & set(banned)
    assert all(np.isfinite(response.logprobs).all() for response in responses)
