"""The engine on vLLM servers, with servers of this test that can fail; `tests/vllm` has the tests with vLLM."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file

from ragen_pl.config import ConfigError, check_config, config_dir, relations
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.checkpoint_weights import checkpoint_weights
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.rollout.agreement import check_servers
from ragen_pl.rollout.context import ContextManager
from ragen_pl.rollout.engine import GenerationRequest, Prompt, generate
from ragen_pl.rollout.errors import RolloutError
from ragen_pl.rollout.vllm_server import VLLMServerEngine


class Server(ThreadingHTTPServer):
    """Answers as vLLM does. A seed decides the response; `faults` are answers to the first requests for one."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, bundle: ModelBundle, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.bundle = bundle
        self.model = {
            "logprobs_mode": "processed_logprobs",
            "dtype": str(bundle.model.dtype),
            "max_model_len": 256,
            "quantization": None,
            "skip_tokenizer_init": False,
            "multimodal_config": None,
        }
        self.load_format = "auto"
        self.chunked = False
        self.version = "default"
        self.paused = False
        self.weights: dict = {}
        self.pushes = 0
        self.shift = 0
        self.disabled: str | None = None
        self.loading = 0
        self.faults: list[int | str] = []
        self.asked: list[dict] = []
        self.delay = 0.0
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.serve_forever, args=(0.005,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def die(self) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        path = self.path.partition("?")[0]
        with suppress(BrokenPipeError, ConnectionResetError):
            if path == self.server.disabled:
                self.answer(403, {"error": {"message": f"{path} is disabled"}})
            elif path == "/server_info" and self.server.loading:
                self.server.loading -= 1
                self.answer(503, None)
            elif path == "/inference/v1/generate" and not body:
                self.answer(400, {"error": {"message": "token_ids: field required"}})
            elif path == "/inference/v1/generate":
                self.sample(body)
            else:
                self.answer(*getattr(self, path.strip("/").replace("/", "_"))(body))

    def answer(self, status: int, body: object) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def server_info(self, _: None) -> tuple[int, object]:
        config = {
            "model_config": self.server.model,
            "load_config": {"load_format": self.server.load_format},
            "device_config": {"device": "cpu"},
            "scheduler_config": {"enable_chunked_prefill": self.server.chunked},
        }
        return 200, {"vllm_config": config}

    def tokenize(self, body: dict) -> tuple[int, object]:
        tokenizer = self.server.bundle.tokenizer
        text = body.get("prompt")
        if text is None:
            text = self.server.bundle.renderer.apply_chat_template(
                body["messages"], add_generation_prompt=True, tokenize=False
            )
        return 200, {"tokens": tokenizer(text, add_special_tokens=False)["input_ids"]}

    def detokenize(self, body: dict) -> tuple[int, object]:
        return 200, {"prompt": self.server.bundle.tokenizer.decode(body["tokens"])}

    def pause(self, _: None) -> tuple[int, object]:
        self.server.paused = True
        return 200, {"status": "paused"}

    def resume(self, _: None) -> tuple[int, object]:
        self.server.paused = False
        return 200, {"status": "resumed"}

    def weight_info(self, _: None) -> tuple[int, object]:
        return 200, {"weight_version": self.server.version}

    def update_weight_version(self, body: dict) -> tuple[int, object]:
        self.server.version = body["new_version"]
        return 200, {"success": True}

    def collective_rpc(self, body: dict) -> tuple[int, object]:
        assert self.server.paused and self.server.version == "replacing"
        folder = Path(body["kwargs"]["weights_path"])
        files = sorted(folder.glob("*.safetensors"))
        if body["method"] != "reload_weights" or not files:
            return 500, {"error": {"message": f"no weights in {folder}"}}
        self.server.weights = {}
        for file in files:
            self.server.weights |= load_file(file)
        self.server.pushes += 1
        return 200, {"results": [None]}

    def reset_prefix_cache(self, _: None) -> tuple[int, object]:
        return 200, {"success": True}

    def reset_encoder_cache(self, _: None) -> tuple[int, object]:
        return 200, None

    def inference_v1_generate(self, body: dict) -> tuple[int, object]:
        server = self.server
        parameters = body["sampling_params"]
        rng = np.random.default_rng(parameters.get("seed"))
        ids = rng.integers(10, 50, parameters["max_tokens"]).tolist()
        choice = {
            "token_ids": ids,
            "logprobs": {"content": [{"logprob": -1.0 - one / 64} for one in ids]},
            "finish_reason": "length",
            "weight_versions": [{"version": server.version, "start": 0, "end": len(ids)}],
        }
        shown = [one + server.shift for one in body["token_ids"]]
        return 200, {"choices": [choice], "prompt_token_ids": shown}

    def sample(self, body: dict) -> None:
        server = self.server
        with server.lock:
            fault = server.faults.pop(0) if server.faults else None
            server.asked.append(body)
            server.under_way += 1
            server.most_under_way = max(server.most_under_way, server.under_way)
        try:
            time.sleep(server.delay)
            if fault == "close":
                self.connection.shutdown(socket.SHUT_RDWR)
            elif fault == "late":
                time.sleep(1.5)
                self.answer(*self.inference_v1_generate(body))
            elif fault == "garbage":
                self.answer(200, {"text": "<html>"})
            elif fault == "abort":
                status, answer = self.inference_v1_generate(body)
                answer["choices"][0]["finish_reason"] = "abort"
                self.answer(status, answer)
            elif isinstance(fault, int):
                self.answer(fault, {"error": {"message": "not\nnow"}})
            else:
                self.answer(*self.inference_v1_generate(body))
        finally:
            with server.lock:
                server.under_way -= 1


@pytest.fixture
def start(lm) -> Iterator:
    """Return a function that starts a server."""
    servers: list[Server] = []

    def make(bundle: ModelBundle = lm, *, port: int = 0) -> Server:
        servers.append(Server(bundle, port))
        return servers[-1]

    yield make
    for server in servers:
        server.die()


@pytest.fixture
def connect(lm) -> Iterator:
    """Return a function that builds an engine on servers."""
    engines: list[VLLMServerEngine] = []

    def make(
        *servers: Server | str, version: int | None = 0, bundle: ModelBundle = lm, **settings
    ) -> VLLMServerEngine:
        urls = [server if isinstance(server, str) else server.url for server in servers]
        engine = VLLMServerEngine(
            PolicyModule(bundle),
            **({"urls": urls, "max_tokens": 256, "timeout_s": 10.0} | settings),
        )
        engines.append(engine)
        if version is not None:
            engine.load_weights(version)
        return engine

    yield make
    for engine in engines:
        engine.close()


def requests(count: int = 8, *, tokens: int = 4) -> list[GenerationRequest]:
    ids = np.array([11, 12, 13])
    prompt = Prompt(ids=ids, unexpanded_ids=ids)
    return [
        GenerationRequest(session=n, prompt=prompt, max_tokens=tokens, temperature=1.0, seed=n)
        for n in range(count)
    ]


def sampled(engine: VLLMServerEngine, count: int = 8) -> list[list[int]]:
    return [one.ids.tolist() for one in generate(engine, requests(count), keep=True)]


def expected(count: int = 8) -> list[list[int]]:
    return [np.random.default_rng(seed).integers(10, 50, 4).tolist() for seed in range(count)]


# ---- what is sent


def test_requests_carry_all_that_decides_a_response(start, connect, lm) -> None:
    servers = [start(), start()]
    engine = connect(*servers, version=7)
    generations = generate(engine, requests(), keep=True)
    assert [one.ids.tolist() for one in generations] == expected()
    assert {one.version for one in generations} == {7}
    assert all(one.hit_length_limit and one.entropy is None for one in generations)
    np.testing.assert_allclose(generations[0].logprobs, -1 - generations[0].ids / 64)
    assert [len(server.asked) for server in servers] == [4, 4]
    parameters = servers[0].asked[0]["sampling_params"]
    assert parameters["seed"] in range(8) and parameters["max_tokens"] == 4
    assert set(parameters["stop_token_ids"]) == set(lm.eos_token_ids)
    assert set(map(int, parameters["logit_bias"])) == set(lm.banned_token_ids)
    assert set(parameters["logit_bias"].values()) <= {float("-inf")}


def test_sessions_stay_with_their_server(start, connect) -> None:
    servers = [start(), start(), start()]
    engine = connect(*servers)
    for _ in range(3):
        sampled(engine)
    for server in servers:
        assert len({body["sampling_params"]["seed"] % 3 for body in server.asked}) == 1


def test_no_more_requests_are_under_way_than_allowed(start, connect) -> None:
    server = start()
    server.delay = 0.02
    assert sampled(connect(server, concurrency=3), 12) == expected(12)
    assert server.most_under_way == 3


def test_released_requests_are_forgotten(start, connect) -> None:
    server = start()
    # longer than the requests take to come
    server.delay = 2.0
    engine = connect(server)
    engine.submit(requests(), keep=True)
    wait(lambda: server.under_way == 8)
    engine.release()
    assert engine.collect() == []
    server.delay = 0.0
    assert sampled(engine, 3) == expected(3)
    # the answers to the released ones come now
    wait(lambda: server.under_way == 0)
    for generation in generate(engine, requests(8, tokens=6), keep=True):
        assert len(generation.ids) == 6


# ---- weights


def test_every_server_gets_the_weights_before_each_rollout(start, connect, fresh_lm) -> None:
    servers = [start(), start()]
    engine = connect(*servers, version=None, bundle=fresh_lm)
    for version in range(2):
        for weight in fresh_lm.model.parameters():
            weight.data.add_(1.0)
        engine.load_weights(version)
        wanted = dict(checkpoint_weights(fresh_lm.model))
        for server in servers:
            assert server.pushes == version + 1 and not server.paused
            assert server.weights.keys() == wanted.keys()
            assert all(server.weights[name].equal(wanted[name]) for name in wanted)


def test_weights_are_removed_at_the_end(start, connect, tmp_path) -> None:
    engine = connect(start(), weights_folder=str(tmp_path))
    engine.load_weights(1)
    engine.load_weights(2)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_weights_of_a_killed_run_are_removed_by_the_next_one(start, connect, tmp_path) -> None:
    code = (
        "import os, signal, sys; from ragen_pl.files import OwnFolder; "
        "folder = OwnFolder('ragen_weights_', place=sys.argv[1]); "
        "(folder.path / 'model.safetensors').write_bytes(b'0'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    first = connect(start(), weights_folder=str(tmp_path))
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (tmp_path / "ragen_weights_of_a_user").mkdir()
    (own,) = tmp_path.glob("*/0")
    assert len(list(tmp_path.iterdir())) == 3 and len(list(tmp_path.glob("*/*.safetensors"))) == 1
    connect(start(), weights_folder=str(tmp_path))
    # those of runs that are alive, and what is of none
    assert len(list(tmp_path.iterdir())) == 3 and not list(tmp_path.glob("*/*.safetensors"))
    assert own.exists()
    first.load_weights(1)


def test_weights_are_removed_when_the_process_ends_with_an_error(tmp_path) -> None:
    code = (
        "import sys; from ragen_pl.files import OwnFolder; "
        "folder = OwnFolder('ragen_weights_', place=sys.argv[1]); "
        "(folder.path / 'model.safetensors').write_bytes(b'0'); raise SystemExit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == 3 and list(tmp_path.iterdir()) == []


def test_a_response_of_other_weights_is_sampled_again(start, connect) -> None:
    server = start()
    engine = connect(server)
    server.version = "default"
    assert sampled(engine) == expected()
    assert server.pushes == 2 and engine.resent > 0


def test_a_server_that_another_run_uses_is_refused(start, connect) -> None:
    server = start()
    first, _ = connect(server), connect(server)
    with pytest.raises(RolloutError, match=rf"{server.url} has got weights of another run"):
        sampled(first)


# ---- faults


@pytest.mark.parametrize("fault", [429, 500, 503, "close", "garbage", "abort", "late"])
def test_faults_change_no_response(start, connect, fault) -> None:
    servers = [start(), start()]
    late = fault == "late"
    engine = connect(*servers, timeout_s=1.0 if late else 30.0)
    servers[0].faults = [fault, fault]
    assert sampled(engine) == expected()
    assert servers[0].faults == []
    # on a busy machine other answers may be late too
    assert engine.resent >= 2 if late else engine.resent == 2
    assert sampled(engine) == expected()


def test_a_late_answer_of_the_only_server_is_asked_for_again(start, connect) -> None:
    server = start()
    engine = connect(server, timeout_s=1.0)
    server.faults = ["late"]
    assert sampled(engine) == expected()
    assert engine.resent >= 1


def test_addresses_of_the_api_are_those_of_the_server(
    start, connect, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    server = start()
    engine = connect(f"{server.url}/v1/", weights_folder="weights")
    assert engine.urls == [server.url] and sampled(engine) == expected()
    # a server has another working directory
    assert str(engine._folder.path).startswith(str(tmp_path / "weights"))


def test_a_dead_servers_requests_go_to_the_others(start, connect, caplog) -> None:
    dead, alive = start(), start()
    engine = connect(dead, alive)
    dead.die()
    caplog.set_level(logging.WARNING)
    assert sampled(engine) == expected()
    assert len(alive.asked) == 8
    engine.load_weights(1)
    assert sampled(engine) == expected()
    assert f"{dead.url} is lost" in caplog.text


def test_a_restarted_server_is_taken_back_with_the_weights(start, connect) -> None:
    dead, alive = start(), start()
    engine = connect(dead, alive)
    dead.die()
    sampled(engine)
    again = start(port=dead.server_port)
    wait(lambda: again.pushes == 1 and again.version == alive.version)
    assert again.weights.keys() == alive.weights.keys()
    wait(lambda: bool(sampled(engine)) and len(again.asked) > 0)
    assert sampled(engine) == expected()


def test_a_server_that_dies_in_the_middle_is_no_loss(start, connect) -> None:
    dying, alive = start(), start()
    dying.delay = alive.delay = 0.1
    engine = connect(dying, alive, concurrency=4)
    engine.submit(requests(16), keep=True)
    time.sleep(0.15)
    dying.faults = ["close"] * 16
    dying.die()
    found = {}
    while len(found) < 16:
        found |= {session: one.ids.tolist() for session, one in engine.collect()}
    assert [found[session] for session in range(16)] == expected(16)


def test_all_servers_dead_is_reported_with_their_addresses(start, connect) -> None:
    servers = [start(), start()]
    engine = connect(*servers, timeout_s=0.5)
    for server in servers:
        server.die()
    message = r"no server has answered for 0\.5 s \(.*{}: .*{}: .*\); start one again, or raise"
    started = time.monotonic()
    with pytest.raises(
        RolloutError, match=message.format(servers[0].url, servers[1].url)
    ) as caught:
        sampled(engine)
    assert 0.5 < time.monotonic() - started < 60
    assert "\n" not in str(caught.value)
    with pytest.raises(RolloutError, match="no server has answered"):
        engine.load_weights(1)


def test_all_servers_may_come_back(start, connect) -> None:
    server = start()
    engine = connect(server)
    server.die()
    engine.submit(requests(), keep=True)
    time.sleep(0.3)
    again = start(port=server.server_port)
    found = {}
    while answers := engine.collect():
        found |= {session: one.ids.tolist() for session, one in answers}
    assert found == dict(enumerate(expected()))
    assert again.pushes == 1


def test_a_request_that_always_fails_ends_the_run(start, connect) -> None:
    server = start()
    engine = connect(server, retries=2)
    server.faults = [500] * 3
    with pytest.raises(RolloutError, match=r"retries=2: a request failed 3 times, .*: not now\)"):
        sampled(engine, 1)


def test_a_refused_request_ends_the_run(start, connect) -> None:
    server = start()
    engine = connect(server)
    server.faults = [400]
    with pytest.raises(
        RolloutError, match=rf"{server.url} refuses a request \(status 400: not now"
    ):
        sampled(engine, 1)


def wait(condition) -> None:
    last = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.02)


# ---- servers that can't serve the policy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "start it with --logprobs-mode processed_logprobs"),
        ({"dtype": "torch.bfloat16"}, r"--dtype float32, or set rollout\.engine\.dtype=bfloat16"),
        ({"max_model_len": 128}, "has --max-model-len 128; start it with --max-model-len 256"),
        ({"quantization": "fp8"}, "has quantized weights"),
    ],
)
def test_a_server_with_other_settings_is_refused_by_name(start, connect, change, message) -> None:
    fine, wrong = start(), start()
    wrong.model |= change
    with pytest.raises(ValueError, match=rf"{wrong.url} has .*{message.removeprefix('has ')}"):
        connect(fine, wrong)


def test_a_server_that_reloads_no_weights_is_refused(start, connect) -> None:
    server = start()
    server.load_format = "dummy"
    with pytest.raises(ValueError, match="--load-format dummy, which reloads no weights"):
        connect(server)


def test_a_server_that_has_no_seeds_on_its_cpu_is_refused(start, connect) -> None:
    server = start()
    server.chunked = True
    with pytest.raises(ValueError, match="start it with --no-enable-chunked-prefill --max-num-ba"):
        connect(server)


def test_a_server_of_another_vocabulary_is_refused(start, connect, fresh_lm) -> None:
    fresh_lm.tokenizer.add_tokens(["<elsewhere>"])
    tokens = fresh_lm.tokenizer
    server = start(fresh_lm)
    found = tokens.decode
    # the same ids mean other texts there
    tokens.decode = lambda ids: found([one ^ 1 for one in ids])
    with pytest.raises(ValueError, match=rf"{server.url} has another tokenizer"):
        connect(server)


def test_a_server_that_splits_texts_in_another_way_is_refused(start, connect, fresh_lm) -> None:
    fresh_lm.tokenizer.add_tokens(["Ziel"])
    server = start(fresh_lm)
    with pytest.raises(ValueError, match=rf"{server.url} has another tokenizer"):
        connect(server)


def test_a_server_with_another_template_is_refused(start, connect, fresh_lm) -> None:
    fresh_lm.tokenizer.chat_template = "{{ messages[0].content }}"
    server = start(fresh_lm)
    with pytest.raises(ValueError, match=rf"{server.url} has another chat template"):
        connect(server)


@pytest.mark.parametrize("path", ["/server_info", "/inference/v1/generate"])
def test_a_server_without_the_endpoints_is_refused(start, connect, path) -> None:
    server = start()
    server.disabled = path
    message = r"takes weights .* is disabled.*VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
    with pytest.raises(ValueError, match=message):
        connect(server)


def test_a_server_that_cannot_see_the_weights_is_refused(start, connect) -> None:
    server = start()
    server.disabled = "/collective_rpc"
    with pytest.raises(RolloutError, match=rf"{server.url} can't load the weights in .*same path"):
        connect(server)


def test_a_server_that_does_not_answer_at_the_start_is_named(start, connect) -> None:
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9 does not answer .*start a server"):
        connect(start(), "http://127.0.0.1:9", retries=1)


def test_a_server_that_starts_late_is_waited_for(start, connect) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    late = threading.Timer(0.3, lambda: start(port=port))
    late.start()
    assert sampled(connect(f"http://127.0.0.1:{port}")) == expected()


def test_a_server_behind_a_gateway_is_waited_for(start, connect) -> None:
    server = start()
    server.loading = 2
    assert sampled(connect(server)) == expected()


def test_a_server_of_another_model_is_found_by_its_logprobs(start, connect, lm) -> None:
    fine, wrong = start(), start()
    engine = connect(fine, wrong)
    with pytest.raises(ValueError, match=rf"{fine.url} has another model than the trainer"):
        check_servers(ContextManager(lm, max_tokens=256), engine, image_size=None)
    assert wrong.asked == []


def test_prompts_that_are_read_in_another_way_are_refused(start, connect) -> None:
    server = start()
    engine = connect(server)
    server.shift = 1
    with pytest.raises(ValueError, match="vLLM read a prompt as 3 tokens, the trainer as 3"):
        sampled(engine, 1)


def test_too_long_prompts_are_refused(start, connect) -> None:
    engine = connect(start(), max_tokens=6)
    with pytest.raises(ValueError, match=r"rollout\.engine\.max_tokens=6: .* set at least 7"):
        sampled(engine, 1)


# ---- settings


def check(*overrides: str) -> None:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        check_config(
            compose("fit", overrides=["rollout/engine=vllm_server", "env=frozenlake", *overrides])
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"rollout\.engine\.urls=\[\]: vllm is not installed, .* pip install vllm"),
        (["rollout.engine.urls=[there]"], r"rollout\.engine\.urls\.0=there: expected text"),
        (
            ["rollout.engine.urls=[http://a]", "rollout.engine.settings={seed: 1}"],
            r"rollout\.engine\.settings: the servers in rollout\.engine\.urls are started already",
        ),
        (
            ["rollout.engine.urls=[http://a]", "rollout.engine.weights_folder=/no/where"],
            r"weights_folder=/no/where: expected a path that exists",
        ),
    ],
)
def test_settings_are_checked_before_a_model_is_built(monkeypatch, overrides, message) -> None:
    monkeypatch.setattr(relations, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message):
        check(*overrides)


def test_addresses_need_no_vllm_here() -> None:
    check("rollout.engine.urls=[http://127.0.0.1:8000, http://127.0.0.1:8001]")


def test_without_vllm_no_server_is_started(monkeypatch, connect) -> None:
    monkeypatch.setattr("ragen_pl.rollout.vllm_process.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="so the run can't start a server; pip install"):
        connect()
