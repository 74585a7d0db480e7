"""The protocol of rollout engines, and settings of the one in the trainer's process."""

import numpy as np
import pytest
import torch
from support.episodes.lake_episodes import talk, talks_with_images, words
from support.episodes.trajectories import make_request
from support.runs.composing import composed

from ragen_pl.assembly.start_check import engine_factory
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.in_process.kv_cache import InPlaceCache, InPlaceLayer
from ragen_pl.engines.protocol import generate
from ragen_pl.modules.policy import PolicyModule

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

    with pytest.raises(RolloutError, match="Silent: it returned no response to 1 of the requests"):
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

    def noted(layer, rows, slots):
        copied = select(layer, rows, slots)
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
