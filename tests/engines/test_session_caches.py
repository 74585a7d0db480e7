"""Keys and values of sessions between turns: what is kept, computed and freed."""

import numpy as np
import pytest
import torch
from support.episodes.lake_episodes import (
    ENVIRONMENTS,
    draws_of,
    plain_logits,
    prompt_of,
    proxy_of,
    replay,
    talks_with_images,
    words,
)
from support.episodes.trajectories import make_request, roll_out, starts

from ragen_pl.base.seeding import derive_seed, uniforms
from ragen_pl.data.validation import ValidationSet
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.in_process import engine as engine_module
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import generate
from ragen_pl.environments.manager import EnvironmentManager, EpisodeSpec
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager


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


@pytest.mark.parametrize("window", [1, 2, "all"])
def test_features_of_images_that_no_prompt_needs_are_dropped_where_they_are_many(
    vlm, monkeypatch, window
):
    """A rollout shows a new image in each turn of each episode."""
    engine = TransformersEngine(PolicyModule(vlm))
    expected = [
        [response.ids.tolist() for response in responses]
        for _, responses in talks_with_images(vlm, engine, slots=2, turns=6, window=window)
    ]
    assert engine.held_images == 12
    of_one = 4 * vlm.hidden_size * vlm.model.dtype.itemsize
    monkeypatch.setattr(engine_module, "HELD_BYTES", 5 * of_one)
    engine = TransformersEngine(PolicyModule(vlm))
    turns = talks_with_images(vlm, engine, slots=2, turns=6, window=window)
    for (_, responses), known in zip(turns, expected, strict=True):
        assert [response.ids.tolist() for response in responses] == known
        assert engine.held_images <= 7


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


def test_empty_slots_of_each_row_are_left_out(lm):
    """In each turn another session has a long response, so all rows have empty slots."""
    engine = TransformersEngine(PolicyModule(lm))
    talks = [words(lm, "me").ids for _ in range(6)]
    for turn in range(6):
        requests = [
            make_request(
                prompt_of(ids), session=n, seed=9 * turn + n, tokens=30 if n == turn else 2
            )
            for n, ids in enumerate(talks)
        ]
        responses = generate(engine, requests, keep=True)
        for n, (single, response) in enumerate(zip(requests, responses, strict=True)):
            assert close(response, replay(lm, single.prompt, draws_of(single), 1.0)), (turn, n)
            talks[n] = np.concatenate([talks[n], response.ids, words(lm, "on").ids])
    longest = max(len(ids) for ids in talks)
    # the last turn's new slots are empty in most rows
    assert engine.held_bytes <= 6 * engine.session_bytes(longest + 30)


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
