"""The in-process engine: its samples and log-probs against plain forward passes, and its caches."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from composing import composed
from trajectories import make_request, roll_out, starts

from ragen_pl.data.collate import collate
from ragen_pl.data.microbatches import split_by_length
from ragen_pl.data.validation import ValidationSet
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.in_process.kv_cache import InPlaceCache, InPlaceLayer
from ragen_pl.engines.protocol import GenerationRequest, Prompt, generate
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.distribution import draw, log_distribution
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.proxy import AgentProxy
from ragen_pl.run.start_check import engine_factory
from ragen_pl.seeding import derive_seed, uniforms
from ragen_pl.trajectory import Observation

ENVIRONMENTS = {"text": "ragen/FrozenLake-v0", "images": "ragen/FrozenLakeVisual-v0"}


def proxy_of(bundle, *, window, kind="text", num_envs=64, temperature=1.0, turns=4, **context):
    return AgentProxy(
        environments=EnvironmentManager(target=ENVIRONMENTS[kind], max_turns=turns, invalid_ends=False),
        context=ContextManager(bundle, window=window, system_prompt=None, **context),
        max_response_tokens=12, temperature=temperature, num_envs=num_envs,
    )  # fmt: skip


def prompt_of(ids: np.ndarray, images=()) -> Prompt:
    return Prompt(ids=ids, unexpanded_ids=ids, images=list(images))


def words(bundle, text: str) -> Prompt:
    return prompt_of(np.array(bundle.tokenizer.encode(f"<|user|>{text}<|assistant|>")))


def draws_of(request: GenerationRequest) -> np.ndarray:
    return uniforms(request.seed, count=request.max_tokens)


def plain_logits(bundle, ids: np.ndarray, images) -> torch.Tensor:
    """The model's own forward over a whole sequence, no cache: `[time, vocab]`."""
    pixels = bundle.processor(images=list(images), return_tensors="pt") if len(images) else {}
    with torch.no_grad():
        return bundle.model(input_ids=torch.from_numpy(ids)[None], **pixels).logits[0]


def replay(bundle, prompt: Prompt, draws: np.ndarray, temperature: float) -> tuple[list, list]:
    """Sample a response token by token, each from a fresh forward over everything before it."""
    ids, logprobs = prompt.ids, []
    banned, greedy = torch.tensor(bundle.banned_token_ids), torch.tensor([False])
    for u in draws:
        logits = plain_logits(bundle, ids, prompt.images)[-1:]
        log_probs = log_distribution(logits, temperature=temperature, banned=banned)
        token = int(draw(log_probs, torch.tensor([u]), greedy=greedy))
        ids, logprobs = np.append(ids, token), [*logprobs, float(log_probs[0, token])]
        if token in bundle.eos_token_ids:
            break
    return ids[len(prompt.ids) :].tolist(), logprobs


def scored(bundle, episodes):
    batch = collate(episodes, bundle)
    with torch.no_grad():
        rows = split_by_length(batch.samples.length, 3)
        scores = PolicyModule(bundle)(batch.samples, batch.images, microbatches=rows)
    return batch, scores


def gap(bundle, episodes) -> torch.Tensor:
    """Difference of the trainer's and the engine's log-probs of the sampled tokens."""
    batch, scores = scored(bundle, episodes)
    return (scores.logprobs - batch.samples.behavior_logprobs)[batch.samples.turn >= 0].abs()


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


# ---- caches


def talks_with_images(bundle, engine, *, slots: int, turns: int, window: int | str = "all"):
    """Conversations with a new image every turn; yields each turn's requests and responses."""
    context, rng = ContextManager(bundle, window=window), np.random.default_rng(0)
    talks = [context.start("rules") for _ in range(slots)]
    for turn in range(turns):
        requests = []
        for slot, talk in enumerate(talks):
            image = rng.integers(0, 255, (32, 32, 3)).astype(np.uint8)
            seen = Observation(text=f"turn {turn}", images=[image])
            prompt = context.observe(talk, seen, max_turns=turns)
            requests.append(make_request(prompt, session=slot, seed=10 * turn + slot))
        responses = generate(engine, requests, keep=True)
        for talk, response in zip(talks, responses, strict=True):
            talk.respond(ids=response.ids, text="", actions=[])
        yield requests, responses


def test_images_of_later_turns_fill_their_own_slots(vlm):
    for requests, responses in talks_with_images(
        vlm, TransformersEngine(PolicyModule(vlm)), slots=3, turns=3
    ):
        for single, response in zip(requests, responses, strict=True):
            assert close(response, replay(vlm, single.prompt, draws_of(single), 1.0))


def test_only_new_tokens_are_computed_and_images_encoded_once(vlm, monkeypatch):
    encoded = []
    plain = vlm.model.get_image_features
    monkeypatch.setattr(
        vlm.model,
        "get_image_features",
        lambda pixel_values: encoded.append(len(pixel_values)) or plain(pixel_values),
    )
    engine, new, sampled, held = TransformersEngine(PolicyModule(vlm)), 0, 0, [0] * 3
    for requests, responses in talks_with_images(vlm, engine, slots=3, turns=4):
        for slot, (single, response) in enumerate(zip(requests, responses, strict=True)):
            new += len(single.prompt.ids) - held[slot]
            # the response's last token was not fed yet; it is, with the next prompt
            held[slot] = len(single.prompt.ids) + len(response.ids) - 1
            sampled += len(response.ids)
    assert (engine.prefilled_tokens, engine.sampled_tokens) == (new, sampled)
    assert encoded == [3, 3, 3, 3]  # one new image an environment and turn


def test_sessions_may_come_in_another_order(lm):
    engine = TransformersEngine(PolicyModule(lm))
    talks = [words(lm, text).ids for text in ("me 1 2", "goal", "avoid holes 3")]
    for turn, order in enumerate([(0, 1, 2), (2, 0, 1), (1, 0, 2)]):
        requests = [make_request(prompt_of(talks[n]), session=n, seed=9 * turn + n) for n in order]
        for single, response in zip(requests, generate(engine, requests, keep=True), strict=True):
            assert close(response, replay(lm, single.prompt, draws_of(single), 1.0))
            talks[single.session] = np.concatenate(
                [single.prompt.ids, response.ids, words(lm, "on").ids]
            )
    assert engine.prefilled_tokens < sum(map(len, talks))


def test_load_weights_drops_every_cache(fresh_vlm):
    bundle, engine = fresh_vlm, TransformersEngine(PolicyModule(fresh_vlm))
    context = ContextManager(bundle, window="all")
    environments = EnvironmentManager(target=ENVIRONMENTS["images"])
    (slot,) = environments.open([EpisodeSpec(group=0, member=0, seed=3)])
    conversation = context.start("")
    first = context.observe(conversation, slot.observation, max_turns=5)
    (response,) = generate(engine, [make_request(first)], keep=True)
    conversation.respond(ids=response.ids, text="", actions=[])
    second = context.observe(conversation, slot.observation, max_turns=5)
    with torch.no_grad():
        for parameter in bundle.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=_generator()))
    fresh = replay(bundle, second, uniforms(derive_seed("test", 9), count=12), 1.0)
    assert engine.held_bytes > 0
    (stale,) = generate(engine, [make_request(second, seed=9)], keep=True)
    assert not close(stale, fresh)
    engine.load_weights(1)
    assert engine.version == 1
    (synced,) = generate(engine, [make_request(second, seed=9)], keep=True)
    assert close(synced, fresh)


def test_a_response_of_other_weights_is_refused(lm):
    class Behind(TransformersEngine):
        """An engine that misses an update."""

        def load_weights(self, version):
            super().load_weights(min(version, 1))

    proxy = proxy_of(lm, window=1)
    played = ValidationSet("held_out", proxy, episodes=2)
    engine = Behind(PolicyModule(lm))
    engine.load_weights(1)
    assert len(played.play(engine, version=1)) == 2
    engine.load_weights(2)
    with pytest.raises(RolloutError, match="weights of step 1, expected step 2"):
        played.play(engine, version=2)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def close(response, expected) -> bool:
    ids, logprobs = expected
    return response.ids.tolist() == ids and bool(
        np.allclose(response.logprobs, logprobs, atol=1e-4)
    )


def test_session_with_another_prompt_starts_afresh(lm):
    engine = TransformersEngine(PolicyModule(lm))
    talks = [words(lm, "me 1 2"), words(lm, "goal")]
    first = generate(engine, [make_request(p, session=n) for n, p in enumerate(talks)], keep=True)
    on = prompt_of(np.concatenate([talks[0].ids, first[0].ids, words(lm, "and then").ids]))
    other = words(lm, "something else altogether")
    responses = generate(
        engine,
        [make_request(on, session=0, seed=4), make_request(other, session=1, seed=5)],
        keep=True,
    )
    for prompt, seed, response in ((on, 4, responses[0]), (other, 5, responses[1])):
        assert close(
            response, replay(lm, prompt, uniforms(derive_seed("test", seed), count=12), 1.0)
        )


def test_finished_sessions_leave_the_other_caches_intact(lm):
    engine = TransformersEngine(PolicyModule(lm))
    talks = {n: words(lm, "me " * (n + 1)).ids for n in range(7)}
    playing = list(talks)
    for turn in range(4):
        seeds = {n: 100 * turn + n for n in playing}
        responses = generate(
            engine,
            [
                make_request(prompt_of(talks[n]), session=n, seed=seeds[n], tokens=4 + 3 * (n % 4))
                for n in playing
            ],
            keep=True,
        )
        for n, response in zip(playing, responses, strict=True):
            draws = uniforms(derive_seed("test", seeds[n]), count=4 + 3 * (n % 4))
            assert close(response, replay(lm, prompt_of(talks[n]), draws, 1.0)), (turn, n)
            talks[n] = np.concatenate([talks[n], response.ids, words(lm, f"turn {turn}").ids])
        playing = [n for n in playing if n % (turn + 2)] or playing


def test_release_and_the_end_of_a_rollout_free_the_caches(vlm):
    engine = TransformersEngine(PolicyModule(vlm))
    assert len(list(talks_with_images(vlm, engine, slots=1, turns=1))) == 1
    assert engine.held_images > 0
    assert engine.held_bytes > 0
    engine.release()
    assert engine.held_bytes == engine.held_images == 0
    roll_out(proxy_of(vlm, window="all", kind="images"), engine, starts(1, 2))
    assert engine.held_bytes == engine.held_images == 0


def test_policy_in_train_mode_raises(fresh_lm):
    fresh_lm.model.train()
    with pytest.raises(RuntimeError, match=r"call policy\.eval\(\)"):
        generate(
            TransformersEngine(PolicyModule(fresh_lm)),
            [make_request(words(fresh_lm, "go"))],
            keep=False,
        )


def test_context_changes_the_logits_of_the_test_models(lm, vlm):
    """The comparisons above need this: an early change moves log-probs by more than their tolerance."""
    for bundle in (lm, vlm):
        first, second = (
            words(bundle, f"{start} me goal avoid holes").ids for start in ("Up", "Down")
        )
        gap = (plain_logits(bundle, first, []) - plain_logits(bundle, second, []))[-1].abs().max()
        assert float(gap) > 0.05


# ---- the protocol


def test_generations_carry_the_version_of_the_weights(lm):
    engine = TransformersEngine(PolicyModule(lm))
    engine.load_weights(7)
    (generation,) = generate(engine, [make_request(words(lm, "go"))], keep=False)
    assert generation.version == 7 and generation.entropy is not None


def test_submitted_requests_are_collected_together(lm):
    engine = TransformersEngine(PolicyModule(lm))
    requests = [make_request(words(lm, "go"), session=n, seed=n) for n in range(3)]
    engine.submit(requests[:1], keep=False)
    engine.submit(requests[1:], keep=False)
    collected = dict(engine.collect())
    assert engine.collect() == []
    expected = generate(TransformersEngine(PolicyModule(lm)), requests, keep=False)
    assert [collected[n].ids.tolist() for n in range(3)] == [
        generation.ids.tolist() for generation in expected
    ]


def test_generate_raises_for_missing_responses(lm):
    class Silent(TransformersEngine):
        def collect(self, *, wait=True):
            return []

    with pytest.raises(RuntimeError, match=r"0 responses for 1 requests.*missing \[0\]"):
        generate(Silent(PolicyModule(lm)), [make_request(words(lm, "go"))], keep=False)


@pytest.mark.parametrize("window", [1, 2, "all"])
def test_unexpanded_ids_have_one_token_for_each_image(vlm, window):
    engine = TransformersEngine(PolicyModule(vlm))
    for requests, _ in talks_with_images(vlm, engine, slots=1, turns=3, window=window):
        prompt = requests[0].prompt
        assert (prompt.unexpanded_ids == vlm.image_token_id).sum() == len(prompt.images)
        # an image of 32 x 32 pixels has 4 features
        counts = np.where(prompt.unexpanded_ids == vlm.image_token_id, 4, 1)
        assert np.repeat(prompt.unexpanded_ids, counts).tolist() == prompt.ids.tolist()


def test_the_config_names_the_engine(lm):
    assert isinstance(
        engine_factory(composed().rollout.engine)(PolicyModule(lm)), TransformersEngine
    )


def talk(bundle, **settings):
    """All responses of three turns with images, in one list."""
    engine = TransformersEngine(PolicyModule(bundle), **settings)
    turns = talks_with_images(bundle, engine, slots=5, turns=3)
    return engine, [response for _, responses in turns for response in responses]


@pytest.mark.parametrize(
    "settings", [{"prefill_tokens": 60}, {"prefill_tokens": 1}, {"cache_bytes": 40_000}]
)
def test_responses_do_not_depend_on_what_is_computed_together(vlm, settings):
    _, whole = talk(vlm)
    engine, split = talk(vlm, **settings)
    for one, other in zip(whole, split, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    # parts of the responses keep no session
    assert (engine.held_bytes == 0) == ("cache_bytes" in settings)


def test_the_cache_holds_what_attention_computes_with(vlm):
    config = vlm.model.config.text_config
    elements = (
        2 * config.num_hidden_layers * config.num_key_value_heads * config.hidden_size
        // config.num_attention_heads
    )  # fmt: skip
    plain = TransformersEngine(PolicyModule(vlm))
    half = TransformersEngine(
        PolicyModule(vlm), forward_context=lambda: torch.autocast("cpu", torch.bfloat16)
    )
    assert plain.session_bytes(1) == 4 * elements
    assert half.session_bytes(3) == 3 * 2 * elements


def test_attention_without_masks_is_refused(fresh_lm):
    fresh_lm.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"model\.build\.attn_implementation.*set sdpa"):
        TransformersEngine(PolicyModule(fresh_lm))


def test_a_copy_of_some_rows_may_free_the_cache_layer_by_layer(monkeypatch):
    cache = InPlaceCache()
    cache.reserve(8)
    states = torch.randn(3, 4, 2, 5, 6)  # layers, rows, heads, slots, size
    for number, layer in enumerate(states):
        cache.update(layer, -layer, number)
    whole, peaks, select = cache.memory_bytes(), [], InPlaceLayer.select

    def noted(layer, rows):
        copied = select(layer, rows)
        peaks.append(cache.memory_bytes() + copied.memory_bytes())
        return copied

    monkeypatch.setattr(InPlaceLayer, "select", noted)
    rows = torch.tensor([2, 0])
    kept = cache.select(rows)
    assert cache.memory_bytes() == whole and kept.memory_bytes() == whole // 2
    peaks.clear()
    kept = cache.select(rows, free=True)
    assert cache.memory_bytes() == 0
    # each layer's copy beside those that are left
    assert peaks == [whole + whole // 6, whole * 2 // 3 + whole // 6, whole // 3 + whole // 6]
    for number, layer in enumerate(states):
        new = torch.zeros(2, 2, 1, 6)
        keys, values = kept.update(new, new, number)
        assert keys[:, :, :5].equal(layer[rows]) and values[:, :, :5].equal(-layer[rows])
