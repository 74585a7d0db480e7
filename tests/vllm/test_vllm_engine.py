"""The engine on vLLM against the trainer: run by `make test-vllm` in an environment with vLLM."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.episodes.trajectories import responses
from support.models.vllm_models import (
    TRUNCATIONS,
    change_weights,
    check_new_weights,
    gap,
    play,
    request,
)

from ragen_pl.base.seeding import derive_seed
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import Prompt, generate
from ragen_pl.models.distribution import log_distribution
from ragen_pl.modules.policy import PolicyModule

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
only_text = pytest.mark.parametrize("engine", ["tied"], indirect=True)


# ---- log-probs


@pytest.mark.parametrize(("window", "temperature"), [("all", 1.0), (2, 0.7)])
def test_logprobs_over_several_turns_are_the_trainers(engine, window, temperature):
    trajectories = play(engine, window=window, temperature=temperature)
    assert gap(engine.bundle, trajectories) < 1e-4
    assert max(len(one.turns) for one in trajectories) == 3
    banned = set(engine.bundle.banned_token_ids)
    assert not any(banned & set(ids) for ids in responses(trajectories))


@only_text
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_logprobs_of_truncated_sampling_are_the_trainers(engine, truncation):
    trajectories = play(engine, groups=8, truncation=truncation, temperature=0.8)
    assert gap(engine.bundle, trajectories, truncation=truncation) < 1e-4
    assert gap(engine.bundle, trajectories) > 0.05


@only_text
def test_first_tokens_have_the_trainers_distribution(engine):
    bundle, count = engine.bundle, 3000
    single = request(bundle, "Where?", tokens=1, temperature=0.8)
    requests = [
        replace(single, session=number, seed=derive_seed("draw", number)) for number in range(count)
    ]
    generations = generate(engine, requests, keep=False)
    drawn = np.bincount([int(one.ids[0]) for one in generations], minlength=len(bundle.tokenizer))
    with torch.no_grad():
        logits = bundle.model(torch.from_numpy(single.prompt.ids)[None]).logits[0, -1]
    banned = torch.tensor(bundle.banned_token_ids)
    expected = log_distribution(logits, temperature=0.8, banned=banned).exp().numpy()
    expected = expected[: len(drawn)] * count
    often = expected > 5
    assert often.sum() > 20
    chi_square = ((drawn - expected)[often] ** 2 / expected[often]).sum()
    assert chi_square < often.sum() + 4 * np.sqrt(2 * often.sum())


def test_greedy_responses_are_the_in_process_engines(engine):
    greedy = play(engine, greedy=True)
    expected = play(TransformersEngine(PolicyModule(engine.bundle)), greedy=True)
    assert responses(greedy) == responses(expected)
    for own, other in zip(greedy, expected, strict=True):
        for turn, expected_turn in zip(own.turns, other.turns, strict=True):
            np.testing.assert_allclose(
                turn.response_logprobs, expected_turn.response_logprobs, atol=1e-4
            )
            assert turn.response_entropy is None


@only_text
def test_greedy_among_sampled_responses_has_logprobs_at_temperature_one(engine):
    bundle = engine.bundle
    requests = [
        request(bundle, "Go.", session=0, temperature=0.0),
        request(bundle, "Go.", session=1, temperature=0.5),
    ]
    first, _ = generate(engine, requests, keep=False)
    (expected,) = generate(TransformersEngine(PolicyModule(bundle)), requests[:1], keep=False)
    assert first.ids.tolist() == expected.ids.tolist()
    np.testing.assert_allclose(first.logprobs, expected.logprobs, atol=1e-4)


# ---- weights


def test_new_weights_are_sampled_from_and_old_keys_are_not_used(engine):
    check_new_weights(engine)


@only_text
def test_long_prompts_are_computed_anew_with_new_weights(engine):
    """Keys are kept by blocks of 128 tokens, which short prompts do not fill."""
    bundle = engine.bundle
    before = {name: weight.clone() for name, weight in bundle.model.state_dict().items()}
    long, parts = request(bundle, "Go. " * 200, temperature=0.0), []
    for _ in range(2):
        prefilled = engine.prefilled_tokens
        generate(engine, [long], keep=False)
        parts.append(engine.prefilled_tokens - prefilled)
    assert parts[1] < len(long.prompt.ids) / 2
    change_weights(bundle, seed=2)
    engine.load_weights(5)
    (own,) = generate(engine, [long], keep=False)
    (expected,) = generate(TransformersEngine(PolicyModule(bundle)), [long], keep=False)
    bundle.model.load_state_dict(before)
    engine.load_weights(6)
    assert own.ids.tolist() == expected.ids.tolist()
    np.testing.assert_allclose(own.logprobs, expected.logprobs, atol=1e-4)


def test_weights_that_do_not_arrive_are_named(engine, monkeypatch):
    engine.load_weights(7)
    assert "layers.0.input_layernorm.weight" in engine._read_back.names
    before = {name: weight.clone() for name, weight in engine.bundle.model.state_dict().items()}
    change_weights(engine.bundle, seed=2)
    reload = engine._llm.collective_rpc

    def loses_all(method, *arguments, **settings):
        if method != "reload_weights":
            return reload(method, *arguments, **settings)
        return [None for _ in settings["kwargs"]["weights_iterator"]]

    with monkeypatch.context() as patched:
        patched.setattr(engine._llm, "collective_rpc", loses_all)
        with pytest.raises(RolloutError, match=r"layers\.0\.\S+\.weight of its model is not"):
            engine.load_weights(8)
    engine.bundle.model.load_state_dict(before)
    engine.load_weights(9)


@only_text
def test_generations_carry_the_version_of_the_weights(engine):
    engine.load_weights(9)
    single = request(engine.bundle, "Go.")
    assert generate(engine, [single], keep=False)[0].version == 9
    engine.load_weights(0)


# ---- seeds and order


def test_a_seed_decides_a_response_whatever_else_is_sampled(engine):
    together = play(engine, groups=4)
    alone = play(engine, groups=4, num_envs=1)
    assert responses(together) == responses(alone)
    assert len({tuple(ids) for ids in responses(together)}) > len(together)


def test_many_long_prompts_are_computed_whole(engine):
    """A seeded request can't go on after a part of its prompt."""
    bundle = engine.bundle
    requests = [request(bundle, f"{n} " + "Go. " * 300, session=n, seed=n) for n in range(16)]
    assert sum(len(each.prompt.ids) for each in requests) > 2 * 4096
    together = generate(engine, requests, keep=False)
    (alone,) = generate(engine, requests[-1:], keep=False)
    assert alone.ids.tolist() == together[-1].ids.tolist()


@only_text
def test_other_seeds_give_other_responses(engine):
    requests = [request(engine.bundle, "Go.", session=n, seed=n) for n in range(8)]
    generations = generate(engine, requests, keep=False)
    assert len({tuple(one.ids.tolist()) for one in generations}) == 8


@only_text
def test_short_responses_come_back_while_long_ones_are_sampled(engine):
    bundle = engine.bundle
    requests = [request(bundle, "Go.", session=n, seed=n, tokens=40) for n in range(64)]
    lengths = [len(one.ids) for one in generate(engine, requests, keep=False)]
    long, short = requests[int(np.argmax(lengths))], requests[int(np.argmin(lengths))]
    assert min(lengths) + 3 < max(lengths)
    engine.submit([long, short], keep=True)
    ((first, _),) = engine.collect()
    later = replace(short, session=100)
    engine.submit([later], keep=True)
    ((second, _),) = engine.collect()
    ((third, generation),) = engine.collect()
    assert (first, second, third) == (short.session, 100, long.session)
    assert len(generation.ids) == max(lengths)
    assert engine.collect() == []


@only_text
def test_release_aborts_what_is_under_way(engine):
    engine.submit([request(engine.bundle, "Go.", tokens=500)], keep=True)
    engine.release()
    assert engine.collect() == []
    assert engine.is_idle


# ---- ends


@only_text
def test_a_response_keeps_its_end_and_has_none_at_the_limit(engine):
    bundle = engine.bundle
    requests = [request(bundle, "Go.", session=n, seed=n, tokens=9) for n in range(64)]
    generations = generate(engine, requests, keep=False)
    ends = bundle.eos_token_ids
    for generation in generations:
        ended = int(generation.ids[-1]) in ends
        assert generation.hit_length_limit is not ended
        assert ended or len(generation.ids) == 9
        assert not ends & set(generation.ids[:-1].tolist())
        assert len(generation.logprobs) == len(generation.ids)
    assert {one.hit_length_limit for one in generations} == {True, False}


@only_text
def test_every_end_of_the_model_is_met(engine):
    requests = [request(engine.bundle, "Go.", session=n, seed=n) for n in range(200)]
    last = {int(one.ids[-1]) for one in generate(engine, requests, keep=False)}
    assert len(last & engine.bundle.eos_token_ids) > 10


# ---- refusals, and what is left alone


@only_text
def test_a_prompt_that_is_too_long_is_refused_and_others_are_answered(engine):
    bundle = engine.bundle
    fine, huge = request(bundle, "Go."), request(bundle, "Go. " * 2000, session=1)
    with pytest.raises(ValueError, match=r"rollout\.engine\.max_tokens=2048: a prompt has .* set"):
        engine.submit([fine, huge], keep=False)
    assert engine.collect() == []
    assert len(generate(engine, [fine], keep=False)[0].ids)


@only_text
def test_images_that_are_shown_in_part_are_refused(engine):
    single = request(engine.bundle, "Go.")
    prompt = replace(single.prompt, patches=[np.arange(2)])
    with pytest.raises(ValueError, match=r"context\.leave_out\.patches=0"):
        engine.submit([replace(single, prompt=prompt)], keep=False)


@pytest.mark.parametrize("engine", ["images"], indirect=True)
def test_an_image_token_without_its_image_is_refused(engine):
    """Ids that are expanded already are expanded again."""
    image = np.zeros((56, 56, 3), np.uint8)
    ids = np.array([engine.bundle.image_token_id])
    prompt = Prompt(ids=np.repeat(ids, 3), unexpanded_ids=ids, images=[image])
    single = replace(request(engine.bundle, "Go."), prompt=prompt)
    with pytest.raises(ValueError, match=r"vLLM read a prompt as 4 tokens, the trainer as 3"):
        generate(engine, [single], keep=False)
