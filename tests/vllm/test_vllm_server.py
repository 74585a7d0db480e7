"""The engine on real vLLM servers: run by `make test-vllm` in an environment with vLLM."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest
import torch
from support.episodes.trajectories import responses
from support.models.vllm_models import (
    TRUNCATIONS,
    build,
    change_weights,
    check_new_weights,
    gap,
    play,
    request,
)
from support.servers.vllm_servers import CACHE_BYTES, ROOT, UserServer, environment
from transformers import AutoModelForCausalLM

from ragen_pl.assembly.teacher_server import TeacherServer
from ragen_pl.config import ConfigError
from ragen_pl.data.batch import Samples
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import Prompt, generate
from ragen_pl.engines.vllm_server.answers import Exchange
from ragen_pl.engines.vllm_server.engine import VLLMServerEngine
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.agreement import check_engine

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
SETTINGS = {"kv_cache_memory_bytes": CACHE_BYTES}


# ---- a server that the engine starts


@pytest.fixture(scope="module")
def engine():
    """An engine with a server of its own, for a model with images."""
    built = VLLMServerEngine(
        PolicyModule(build("images")), max_tokens=2048, timeout_s=600.0, settings=SETTINGS
    )
    built.load_weights(0)
    yield built
    built.close()


@pytest.mark.parametrize(("window", "temperature"), [("all", 1.0), (2, 0.7)])
def test_logprobs_over_several_turns_are_the_trainers(engine, window, temperature):
    trajectories = play(engine, window=window, temperature=temperature)
    assert gap(engine.bundle, trajectories) < 1e-4
    assert max(len(one.turns) for one in trajectories) == 3
    assert all(turn.observation.images for one in trajectories for turn in one.turns)
    banned = set(engine.bundle.banned_token_ids)
    assert banned and not any(banned & set(ids) for ids in responses(trajectories))


def test_logprobs_of_truncated_sampling_are_the_trainers(engine):
    trajectories = play(engine, truncation=TRUNCATIONS[-1])
    assert gap(engine.bundle, trajectories, truncation=TRUNCATIONS[-1]) < 1e-4
    assert gap(engine.bundle, trajectories) > 0.05


def test_new_weights_are_sampled_from_and_old_keys_are_not_used(engine):
    check_new_weights(engine)


def test_greedy_responses_are_the_in_process_engines(engine):
    greedy = play(engine, greedy=True)
    expected = play(TransformersEngine(PolicyModule(engine.bundle)), greedy=True)
    assert responses(greedy) == responses(expected)


def test_a_seed_decides_a_response_whatever_else_is_sampled(engine):
    together = play(engine, groups=4)
    assert responses(together) == responses(play(engine, groups=4, num_envs=1))


def test_a_response_keeps_its_end_and_has_none_at_the_limit(engine):
    bundle = engine.bundle
    requests = [request(bundle, "Go.", session=n, seed=n, tokens=9) for n in range(64)]
    generations = generate(engine, requests, keep=False)
    for generation in generations:
        ended = int(generation.ids[-1]) in bundle.eos_token_ids
        assert generation.hit_length_limit is not ended
        assert ended or len(generation.ids) == 9
        assert not bundle.eos_token_ids & set(generation.ids[:-1].tolist())
    assert {one.hit_length_limit for one in generations} == {True, False}


def test_an_image_token_without_its_image_is_refused(engine):
    """Ids that are expanded already are expanded again."""
    image = np.zeros((56, 56, 3), np.uint8)
    ids = np.array([engine.bundle.image_token_id])
    single = request(engine.bundle, "Go.")
    single.prompt = Prompt(ids=np.repeat(ids, 3), unexpanded_ids=ids, images=[image])
    with pytest.raises(ValueError, match=r"vLLM read a prompt as 4 tokens, the trainer as 3"):
        generate(engine, [single], keep=False)


def test_released_requests_are_aborted(engine, endless):
    engine.exchange, before = Exchange(engine.bundle), counted(engine, "request_success_total")
    engine.submit([request(engine.bundle, "Go.", tokens=2000, seed=n) for n in range(4)], keep=True)
    wait(lambda: counted(engine, "num_requests_running") > 0)
    engine.release()
    wait(lambda: counted(engine, "num_requests_running") == 0)
    # none came to its end
    assert counted(engine, "request_success_total") == before
    assert engine.collect() == []


@pytest.fixture
def endless(monkeypatch, engine):
    """Let no token end a response; the engine is as before afterwards."""
    before = engine.exchange
    monkeypatch.setattr(ModelBundle, "eos_token_ids", frozenset())
    yield
    engine.exchange = before


def wait(condition, *, limit: float = 300.0) -> None:
    last = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.1)


def counted(engine, name: str) -> int:
    """Return a count of the engine's own server."""
    asked = urllib.request.Request(f"{engine.urls[0]}/metrics", headers=authorization(engine))
    with urllib.request.urlopen(asked, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line for line in lines if line.startswith(f"vllm:{name}")]
    return sum(int(float(line.split()[-1])) for line in counts)


def authorization(engine) -> dict[str, str]:
    return {"Authorization": f"Bearer {engine.key}"}


@pytest.mark.parametrize(
    "path", ["collective_rpc", "inference/v1/generate", "v1/models", "weight_info", "health"]
)
def test_its_server_answers_nobody_without_the_key(engine, path):
    url, body = f"{engine.urls[0]}/{path}", b"{}" if "_" in path or "inf" in path else None
    for headers in ({}, {"Authorization": f"Bearer {engine.key}x"}):
        with pytest.raises(HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60)
    command = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    shown = [Path(f"/proc/{child}/cmdline").read_text() for child in command]
    assert any("--middleware" in line for line in shown)
    assert not any(engine.key in line for line in shown)


def test_after_weights_that_are_not_finite_sound_ones_are_sampled(engine):
    bundle = engine.bundle
    before = {name: weight.clone() for name, weight in bundle.model.state_dict().items()}
    with torch.no_grad():
        for weight in bundle.model.parameters():
            weight.fill_(math.nan)
    engine.load_weights(7)
    engine.submit([request(bundle, "Go.", session=n, seed=n) for n in range(4)], keep=True)
    wait(lambda: engine.resent > 0)
    assert engine.collect(wait=False) == []
    bundle.model.load_state_dict(before)
    engine.load_weights(8)
    assert gap(bundle, play(engine)) < 1e-4


def test_each_server_agrees_with_the_trainer(engine):
    check_engine(ContextManager(engine.bundle, max_tokens=2048), engine, image_size=(56, 56))


def test_a_server_may_split_its_model_over_processes(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    bundle = build("text")
    settings = SETTINGS | {"tensor_parallel_size": 2}
    engine = VLLMServerEngine(
        PolicyModule(bundle), max_tokens=2048, timeout_s=600.0, settings=settings
    )
    try:
        for version in range(2):
            change_weights(bundle, seed=version)
            engine.load_weights(version)
            assert gap(bundle, play(engine)) < 1e-4
    finally:
        engine.close()


def started_by(run: subprocess.Popen[bytes]) -> int:
    """Return the process group of the server that a process starts, once it is there."""
    while run.poll() is None:
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        # a server is the first process of a group of its own
        for group in map(int, children):
            with suppress(ProcessLookupError):
                if os.getpgid(group) == group:
                    return group
        time.sleep(0.1)
    raise AssertionError(f"it ended with code {run.returncode}")


def test_its_server_ends_with_the_process(tmp_path):
    """Even one that is killed."""
    code = (
        "import sys; sys.path.insert(0, 'tests'); from support.models import vllm_models; "
        "from ragen_pl.modules.policy import PolicyModule; "
        "from ragen_pl.engines.vllm_server import engine; "
        "engine.VLLMServerEngine(PolicyModule(vllm_models.build('text')), max_tokens=512)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment()) as run:
        group = started_by(run)
        os.killpg(group, 0)
        run.kill()
    last = time.monotonic() + 300
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < last:
            os.killpg(group, 0)
            time.sleep(0.5)


def test_its_server_may_be_of_another_environment(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntouch {tmp_path}/used\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr("ragen_pl.engines.vllm.rules.find_spec", lambda name: None)
    engine = VLLMServerEngine(
        PolicyModule(build("text")),
        max_tokens=2048,
        timeout_s=600.0,
        settings=SETTINGS,
        python=str(python),
    )
    try:
        engine.load_weights(0)
        assert (tmp_path / "used").exists() and gap(engine.bundle, play(engine)) < 1e-4
    finally:
        engine.close()


def test_a_server_that_cannot_start_is_reported():
    with pytest.raises(
        ValueError, match=r"the vLLM server ended \(.*no-such-option.*\); set other"
    ):
        VLLMServerEngine(
            PolicyModule(build("text")),
            max_tokens=512,
            timeout_s=300.0,
            settings={"no_such_option": 1},
        )


# ---- servers that a user starts


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers of a text model."""
    folder = tmp_path_factory.mktemp("servers") / "model"
    build("text").save(folder)
    flags = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs")
    started = [UserServer(folder, *flags) for _ in range(2)]
    try:
        for server in started:
            server.wait()
        yield started
    finally:
        for server in started:
            server.kill()


@pytest.fixture
def connect(servers):
    """Return a function that builds an engine on both servers."""
    engines = []

    def make(bundle: ModelBundle, **settings) -> VLLMServerEngine:
        arguments = {"urls": [one.url for one in servers], "max_tokens": 2048, "timeout_s": 600.0}
        engines.append(VLLMServerEngine(PolicyModule(bundle), **(arguments | settings)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_servers_score_a_policys_tokens_as_a_teacher(servers):
    bundle = build("text")
    teacher = TeacherServer(urls=[one.url for one in servers], timeout_s=600.0)
    teacher.check(bundle)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, 80, (6, 30), generator=generator)
    lengths = torch.tensor([30, 12, 2, 30, 7, 19])
    place = torch.arange(30)[None, :]
    samples = Samples.of_one_turn(
        ids,
        (place >= 1) & (place < lengths[:, None]),
        length=lengths,
        image_index=torch.full((6, 0), -1),
    )
    scores = teacher.build(PolicyModule(bundle))(samples, ()).logprobs
    model = AutoModelForCausalLM.from_pretrained(servers[0].folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])
    expected = torch.where(samples.turn[:, 1:] >= 0, logprobs.squeeze(-1), 0.0)
    assert torch.allclose(scores[:, 1:], expected, atol=1e-4) and expected.std() > 0.1


def test_servers_tell_the_most_likely_ids_of_a_teacher(servers):
    bundle = build("text")
    teacher = TeacherServer(urls=[one.url for one in servers], timeout_s=600.0)
    with pytest.raises(ConfigError, match=r"top_k=21: .* 20.*; start it with --max-logprobs 21"):
        teacher.check_top(21)
    teacher.check_top(20)
    ids = torch.randint(20, 80, (4, 30), generator=torch.Generator().manual_seed(0))
    samples = Samples.of_one_turn(
        ids,
        (torch.arange(30) >= 10).expand(4, -1),
        length=torch.full((4,), 30),
        image_index=torch.full((4, 0), -1),
    )
    found = teacher.build(PolicyModule(bundle)).top_logprobs(samples, 20)
    model = AutoModelForCausalLM.from_pretrained(servers[0].folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(ids).logits[:, 9:-1].log_softmax(-1).flatten(0, 1)
    known, of_model = logprobs.topk(20)
    possible = ~torch.isin(of_model, bundle.banned(ids.device))
    assert not possible.all() and possible.any(-1).all()
    # the others among the 20 are left out, and what is left has a sum of 1
    never = (known.exp() * ~possible).sum(-1, keepdim=True)
    own = (logprobs - (1 - never).log()).gather(-1, found.ids.long())
    assert torch.allclose(found.logprobs[:, :-1], own, atol=1e-4)
    rest = (1 - known.exp().sum(-1)) / (1 - never.squeeze(-1))
    assert torch.allclose(found.logprobs[:, -1].exp(), rest, atol=1e-4)
    sizes = [len({*row}) for row in found.ids.tolist()]
    assert sizes == possible.sum(-1).tolist()


def test_two_servers_share_the_sessions(connect):
    engine = connect(build("text"))
    engine.load_weights(0)
    both = play(engine)
    assert gap(engine.bundle, both) < 1e-4
    for url in engine.urls:
        with engine.only(url):
            alone = play(engine)
        assert responses(alone) == responses(both)


def test_a_server_with_another_template_or_vocabulary_is_refused_by_name(connect, servers):
    other = build("text")
    other.tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ValueError, match=rf"{servers[0].url} has another chat template"):
        connect(other)
    other = build("text")
    other.tokenizer.add_tokens(["Ziel"])
    with pytest.raises(ValueError, match=rf"{servers[0].url} has another tokenizer"):
        connect(other)
    with pytest.raises(ValueError, match=rf"{servers[0].url} has --max-model-len 2048; start"):
        connect(build("text"), max_tokens=4096)
    with pytest.raises(ValueError, match=rf"{servers[0].url} has --dtype float32; start it with"):
        connect(build("text"), dtype="bfloat16")


def test_a_server_with_another_model_is_refused_by_name(connect, servers):
    """Of another setting, which its weights do not show."""
    setting = build("text")
    setting.model.config.rms_norm_eps = 0.5
    for part in setting.model.modules():
        if type(part).__name__ == "Qwen2RMSNorm":
            part.variance_epsilon = 0.5
    engine = connect(setting)
    engine.load_weights(0)
    with pytest.raises(ValueError, match=rf"{servers[0].url} has another model than the trainer"):
        check_engine(ContextManager(setting, max_tokens=2048), engine, image_size=None)


def test_a_killed_server_is_no_loss_and_is_taken_back_with_the_weights(connect, servers, endless):
    bundle = build("text")
    change_weights(bundle, seed=3)
    # without probes: the server is lost when it is killed
    engine = connect(bundle, timeout_s=600.0, probe_s=600.0)
    engine.load_weights(1)
    requests = [request(bundle, "Go.", session=n, seed=n, tokens=200) for n in range(32)]
    expected = [one.ids.tolist() for one in generate(engine, requests, keep=False)]
    # it takes requests and finishes none, however quick the machine is
    servers[0].freeze()
    engine.submit(requests, keep=False)
    found = {}
    while len(found) < 16:
        found |= {session: one.ids.tolist() for session, one in engine.collect()}
    assert set(found) == set(range(1, 32, 2))
    servers[0].kill()
    while len(found) < 32:
        found |= {session: one.ids.tolist() for session, one in engine.collect()}
    assert [found[session] for session in range(32)] == expected
    assert engine.resent == 16
    change_weights(bundle, seed=4)
    engine.load_weights(2)
    assert gap(bundle, play(engine)) < 1e-4
    servers[0].start()
    servers[0].wait()
    with engine.only(servers[0].url):
        assert gap(bundle, play(engine)) < 1e-4


def test_a_frozen_server_is_found_by_its_probes(connect, servers):
    bundle = build("text")
    # on a busy machine probes of the other one may fail too, which costs time only
    engine = connect(bundle, timeout_s=600.0, probe_s=1.0)
    engine.load_weights(1)
    requests = [request(bundle, "Go.", session=n, seed=n) for n in range(8)]
    expected = [one.ids.tolist() for one in generate(engine, requests, keep=False)]
    servers[0].freeze()
    try:
        found = [one.ids.tolist() for one in generate(engine, requests, keep=False)]
    finally:
        servers[0].thaw()
    assert found == expected and engine.resent >= 4
    with engine.only(servers[0].url):
        assert gap(bundle, play(engine)) < 1e-4


def test_a_server_with_other_shapes_is_refused_by_name(connect, servers):
    # the last test of these servers: they have to be started again
    shapes = build("text")
    shapes.model.resize_token_embeddings(shapes.model.config.vocab_size + 64)
    with pytest.raises(RolloutError, match=rf"{servers[0].url} can't load the weights"):
        connect(shapes).load_weights(0)
