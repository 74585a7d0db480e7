"""The step of fixed shapes, which CUDA graphs replay, without a graph: it samples what the plain path samples."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from support.episodes.lake_episodes import (
    draws_of,
    prompt_of,
    proxy_of,
    replay,
    talks_with_images,
    words,
)
from support.episodes.trajectories import make_request, roll_out, starts
from support.machines.host_reads import HostReads
from support.models.compared_logprobs import play
from support.models.family_models import MODELS, tiny
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragen_pl.engines.in_process.engine import TransformersEngine, static_problem
from ragen_pl.engines.in_process.sampling import SamplingParameters
from ragen_pl.engines.in_process.static_step import Inputs, Place, StaticStep
from ragen_pl.engines.protocol import generate
from ragen_pl.models.inputs import DecoderInputs, run_decoder
from ragen_pl.models.truncation import Truncation
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.policy import PolicyModule

STATIC = {"static_step": True, "tokens_per_read": 3}


def engine_of(bundle, **settings):
    return TransformersEngine(PolicyModule(bundle).eval(), **settings)


def close(one, other):
    assert one.ids.tolist() == other.ids.tolist()
    assert one.hit_length_limit == other.hit_length_limit
    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=1e-5)
    assert one.entropy == pytest.approx(other.entropy, abs=1e-5)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_every_family_samples_the_same(name, keep):
    bundle = tiny(name)
    if problem := static_problem(bundle.facts):
        assert MODELS[name].recurrent or "experts" in problem
        with pytest.raises(ValueError, match=r"rollout\.engine\.static_step=true: .*; set null"):
            engine_of(bundle, **STATIC)
        return
    single = MODELS[name].single_image
    plain, static = (
        play(
            bundle,
            window=1 if single else "all",
            keep=keep,
            single_image=single,
            engine=engine_of(bundle, **settings),
        )
        for settings in ({}, STATIC)
    )
    for episode, other in zip(plain, static, strict=True):
        for said, again in zip(episode, other, strict=True):
            close(said.generation, again.generation)


@pytest.mark.parametrize("kind", ["text", "images"])
@pytest.mark.parametrize("window", [1, 2, "all"])
def test_episodes_are_the_same(lm, vlm, kind, window):
    """Of 24 rows, which are halved more than once, with a shared prefix and sessions that end."""
    bundle = vlm if kind == "images" else lm
    found = []
    for settings in ({}, STATIC):
        proxy = proxy_of(bundle, window=window, kind=kind)
        engine = engine_of(bundle, **settings)
        found.append([roll_out(proxy, engine, starts(12, 2), seed_key=(n,)) for n in range(2)])
    plain, static = ([e for call in calls for e in call] for calls in found)
    for episode, other in zip(plain, static, strict=True):
        assert len(episode.turns) == len(other.turns)
        for turn, again in zip(episode.turns, other.turns, strict=True):
            assert turn.response_ids.tolist() == again.response_ids.tolist()
            np.testing.assert_allclose(turn.response_logprobs, again.response_logprobs, atol=1e-5)


def test_rows_are_dropped_moved_and_put_back(lm):
    """Sessions of many lengths go on after their rows were moved, in another order and fewer of them."""
    engine = engine_of(lm, static_step=True, tokens_per_read=2)
    talks = {n: words(lm, "me " * (n + 1)).ids for n in range(40)}
    playing = list(talks)
    for turn in range(4):
        requests = [
            make_request(
                prompt_of(talks[n]), session=n, seed=100 * turn + n, tokens=2 + 5 * (n % 7)
            )
            for n in playing
        ]
        responses = generate(engine, requests, keep=True)
        for request, response in zip(requests, responses, strict=True):
            ids, logprobs = replay(lm, request.prompt, draws_of(request), 1.0)
            assert response.ids.tolist() == ids, (turn, request.session)
            np.testing.assert_allclose(response.logprobs, logprobs, atol=1e-4)
            talks[request.session] = np.concatenate(
                [request.prompt.ids, response.ids, words(lm, f"turn {turn}").ids]
            )
        playing = [n for n in playing if n % (turn + 2)][::-1]
    assert engine.prefilled_tokens < sum(map(len, talks.values()))


def test_buffers_grow_with_the_sessions_and_stay_where_they_are(vlm):
    engines = engine_of(vlm), engine_of(vlm, **STATIC)
    talks = [talks_with_images(vlm, engine, slots=5, turns=16) for engine in engines]
    sizes = []
    for (_, plain), (_, static) in zip(*talks, strict=True):
        for one, other in zip(plain, static, strict=True):
            close(one, other)
        sizes.append(engines[1].held_bytes)
    assert len(set(sizes)) == 2 and len(set(sizes[:5])) == 1


def test_later_rollouts_read_the_window_of_the_longest_session_or_a_part_of_it(lm):
    step = StaticStep(lm)
    assert [step.window(slots) for slots in (600, 700, 1100)] == [768, 768, 1280]
    assert [step.window(slots) for slots in (600, 700, 1100, 300, 10)] == [
        640,
        1280,
        1280,
        320,
        320,
    ]
    limited = StaticStep(lm, anticipates=False)
    assert [limited.window(slots) for slots in (1100, 600)] == [1280, 768]
    engine = engine_of(lm, **STATIC)
    long = make_request(words(lm, "me " * 300), tokens=30)
    generate(engine, [long], keep=False)
    held = engine.static_bytes
    engine.sleep()
    short = make_request(words(lm, "me"), seed=3)
    close(*generate(engine_of(lm), [short], keep=False), *generate(engine, [short], keep=False))
    assert engine.static_bytes == held


def test_sampling_parameters_of_each_row(lm):
    settings = [
        {"temperature": 0.0},
        {"temperature": 0.5, "truncation": Truncation(top_k=3)},
        {"temperature": 2.0, "tokens": 3},
        {"truncation": Truncation(top_p=0.6)},
        {},
    ]
    requests = [
        make_request(words(lm, "me 1 2"), session=n, seed=n, **{"tokens": 20} | each)
        for n, each in enumerate(settings)
    ]
    engine = engine_of(lm, **STATIC)
    for chosen in (requests, requests[:1], requests[1:4]):
        plain = generate(engine_of(lm), chosen, keep=False)
        for one, other in zip(plain, generate(engine, chosen, keep=False), strict=True):
            close(one, other)
            for attribute in ("kept_ids", "kept_counts"):
                first, second = getattr(one, attribute), getattr(other, attribute)
                assert (first is None) == (second is None)
                assert first is None or first.tolist() == second.tolist()


def test_autocast_and_parts_of_limited_bytes(lm):
    def half():
        return torch.autocast("cpu", torch.bfloat16)

    prompts = [words(lm, "me " * (n % 5 + 1)) for n in range(9)]
    requests = [make_request(prompt, session=n, seed=n) for n, prompt in enumerate(prompts)]
    (plain, static), limited = (
        [generate(engine_of(lm, forward_context=half, **each), requests, keep=False) for each in ({}, STATIC)],
        engine_of(lm, cache_bytes=10 * engine_of(lm).session_bytes(256) // 2, **STATIC),
    )  # fmt: skip
    for one, other in zip(plain, static, strict=True):
        assert one.ids.tolist()[:1] == other.ids.tolist()[:1]
        np.testing.assert_allclose(one.logprobs[0], other.logprobs[0], atol=1e-2)
    for one, other in zip(
        generate(engine_of(lm), requests, keep=False),
        generate(limited, requests, keep=False),
        strict=True,
    ):
        close(one, other)


def test_a_long_prompt_and_a_long_response_share_the_limit_of_bytes(lm):
    # rows have room for both, whichever request has which
    requests = [
        make_request(words(lm, "me " * 400), session=0, tokens=8),
        make_request(words(lm, "me"), session=1, tokens=400),
    ]
    limit = 2 * engine_of(lm).session_bytes(512)
    engine = engine_of(lm, cache_bytes=limit, **STATIC)
    generate(engine, requests, keep=False)
    assert 0 < engine.static_bytes <= limit


def test_a_step_reads_nothing_on_the_host(lm):
    counts = []
    for tokens in (1, 40):
        requests = [
            make_request(words(lm, "me"), session=n, seed=n, tokens=tokens) for n in range(3)
        ]
        with HostReads() as host:
            responses = generate(
                engine_of(lm, static_step=True, tokens_per_read=8), requests, keep=False
            )
        counts.append(host.count)
    assert max(len(response.ids) for response in responses) > 16
    assert counts[0] == counts[1]


def on_a_fake_gpu(bundle, critic):
    """Put tensors without data in the place of the weights of a model and a critic."""
    for part in chain(bundle.model.modules(), critic.modules()):
        for name, weight in part._parameters.items():
            if weight is not None:
                fake = torch.empty(weight.shape, dtype=weight.dtype, device="cuda")
                part._parameters[name] = torch.nn.Parameter(fake)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
    if bundle.images is not None:
        types = bundle.images._types
        tables = {
            name: torch.zeros(table.shape, dtype=table.dtype, device="cuda")
            for name, table in types.tables.items()
        }
        bundle.images._types = replace(types, tables=tables)


class HostTensors(TorchDispatchMode):
    """Notes operations with tensors of the host, which a graph does not replay."""

    def __init__(self):
        super().__init__()
        self.noted, self.count = [], 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        used = [
            each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)
        ]
        self.count += 1
        if any(each.device.type == "cpu" for each in used):
            self.noted.append(str(operation))
        return result


@pytest.mark.parametrize("truncation", [None, Truncation(top_p=0.9, top_k=5, min_p=0.1)])
@pytest.mark.parametrize("name", ["lm", *MODELS])
def test_a_graph_could_hold_all_that_a_step_does(fresh_lm, name, truncation):
    """Tensors of a fake GPU have no values: whatever reads one fails."""
    bundle = fresh_lm if name == "lm" else tiny(name)
    if static_problem(bundle.facts):
        return
    if bundle.images is not None:
        bundle.images.token_types(torch.zeros(1, 1, dtype=torch.int64), shown=False)
    with FakeTensorMode(), torch.no_grad():
        critic = CriticModule(bundle.hidden_size)
        on_a_fake_gpu(bundle, critic)
        step = StaticStep(bundle)
        step.critic = critic
        step.cache.begin(rows=8, slots=100)
        ids = torch.zeros(8, 5, dtype=torch.int64, device="cuda")
        axes = bundle.facts.position_axes
        positions = ids if axes == 1 else ids.expand(axes, 8, 5)
        run_decoder(bundle, DecoderInputs(ids=ids, positions=positions), cache=step.cache)
        step.inputs = inputs = Inputs.empty(8, 256, ids.device)
        parameters = SamplingParameters(
            uniforms=inputs.draws,
            temperature=inputs.temperature,
            greedy=inputs.greedy,
            banned=torch.zeros(3, dtype=torch.int64, device="cuda"),
            truncations=() if truncation is None else ((truncation, inputs.greedy),),
        )
        with HostTensors() as host:
            sampled = step.run(Place(8, 256, inputs.slot), parameters, left=1)
    assert host.count > 100 and not host.noted
    assert sampled.tokens.shape == sampled.values.shape == (8,)
    assert (sampled.kept is None) == (truncation is None)


def test_release_keeps_the_buffers_and_sleep_frees_them(vlm):
    engine = engine_of(vlm, **STATIC)
    list(talks_with_images(vlm, engine, slots=2, turns=1))
    assert engine.held_bytes > 0 and engine.static_bytes == engine.held_bytes
    engine.release()
    assert engine.held_bytes == 0 and engine.static_bytes > 0
    engine.sleep()
    assert engine.static_bytes == 0
