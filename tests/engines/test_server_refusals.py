"""Servers that can't serve the policy, settings of the engine, and the checks of several ranks."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request

import numpy as np
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from hydra import compose, initialize_config_dir
from support.models.tiny_models import TEXT
from support.runs.module_process import start_server
from support.servers.fake_vllm import wait
from support.servers.server_engines import expected, requests, sampled

from ragen_pl.config import ConfigError, check_config, config_dir
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import generate
from ragen_pl.engines.vllm_server.engine import VLLMServerEngine
from ragen_pl.models.build import build_small_lm
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.agreement import check_engine

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
        check_engine(ContextManager(lm, max_tokens=256), engine, image_size=None)
    assert wrong.asked == []


def test_images_that_are_read_in_another_way_are_refused(start, connect) -> None:
    server = start()
    engine = connect(server)
    server.shift = 1
    single = requests(1)[0]
    single.prompt.images = [np.zeros((4, 4, 3), np.uint8)]
    with pytest.raises(ValueError, match="vLLM read a prompt as 3 tokens, the trainer as 3"):
        generate(engine, [single], keep=True)


def test_too_long_prompts_are_refused(start, connect) -> None:
    engine = connect(start(), max_tokens=6)
    with pytest.raises(ValueError, match=r"rollout\.engine\.max_tokens=6: .* set at least 7"):
        sampled(engine, 1)


# ---- ranks


def label_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/weight_info") as answer:
        return json.load(answer)["weight_version"]


def use_servers(rank: int, folder: str, urls: list[str]) -> None:
    """Sample on one of two ranks, before and after servers have lost their weights."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    bundle = build_small_lm(seed=0, text=TEXT)
    engine = VLLMServerEngine(
        PolicyModule(bundle), urls=urls, max_tokens=256, timeout_s=300.0, probe_s=0.2
    )
    engine.load_weights(0)
    assert sampled(engine) == expected()
    dist.barrier()
    present = list(map(label_of, urls))
    dist.barrier()
    if rank == 1:
        for url in urls:
            body = json.dumps({"new_version": "default"}).encode()
            urllib.request.urlopen(f"{url}/update_weight_version", data=body).close()
    dist.barrier()
    assert sampled(engine) == expected()
    # one that no request went to gets its weights after a probe
    wait(lambda: list(map(label_of, urls)) == present)
    dist.barrier()
    engine.close()
    dist.destroy_process_group()


@pytest.mark.slow
def test_one_rank_checks_each_server_and_the_first_hands_over_weights(start, tmp_path) -> None:
    servers = [start() for _ in range(2)]
    arguments = (str(tmp_path), [server.url for server in servers])
    mp.start_processes(use_servers, arguments, nprocs=2, start_method=start_server())
    for server in servers:
        # once at the start and once after they were lost, by both ranks together
        assert server.calls["/server_info"] == server.pushes == 2


# ---- settings


def check(*overrides: str) -> None:
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        check_config(
            compose("fit", overrides=["rollout/engine=vllm_server", "env=frozenlake", *overrides])
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"rollout\.engine\.urls=\[\]: vllm is not installed, .*ragen_pl\[vllm\]'"),
        (["rollout.engine.urls=[there]"], r"rollout\.engine\.urls\.0=there: expected text"),
        (
            ["rollout.engine.urls=[http://a]", "rollout.engine.settings={seed: 1}"],
            r"rollout\.engine\.settings: the servers in rollout\.engine\.urls are started already",
        ),
        (
            ["rollout.engine.urls=[http://a]", "rollout.engine.python=/bin/sh"],
            r"rollout\.engine\.python: the servers in rollout\.engine\.urls are started already",
        ),
        (
            ["rollout.engine.python=/no/where"],
            r"rollout\.engine\.python=/no/where: expected a path that exists",
        ),
        (
            ["rollout.engine.router_url=http://a"],
            r"rollout\.engine\.router_url: a router stands before servers of the user's; give their addresses",
        ),
        (
            ["rollout.engine.transfer=pull"],
            r"rollout\.engine\.transfer=pull: the server that the run starts sees the folder",
        ),
        (
            ["rollout.engine.urls=[http://a]", "rollout.engine.transfer=push"],
            r"rollout\.engine\.transfer=push: expected ",
        ),
        (
            ["rollout.engine.urls=[http://a]", "rollout.engine.serve_address=10.0.0.1:9400"],
            r"serve_address=10\.0\.0\.1:9400: weights are served with transfer=pull or adapters only",
        ),
        (
            [
                "rollout.engine.urls=[http://a]",
                "rollout.engine.transfer=pull",
                "rollout.engine.serve_address=10.0.0.1",
            ],
            r"rollout\.engine\.serve_address=10\.0\.0\.1: expected text such as 10\.0\.0\.1:9400",
        ),
        (
            ["rollout.engine.urls=[http://a]", "rollout.engine.transfer=adapters"],
            r"transfer=adapters: model\.build\.lora=null has no adapters; set model\.build\.lora",
        ),
        (
            [
                "rollout.engine.urls=[http://a]",
                "rollout.engine.transfer=adapters",
                "model=qwen2_5",
                "model.build.lora={r: 4, use_dora: true}",
            ],
            r"transfer=adapters: vLLM serves no adapters of model\.build\.lora\.use_dora=True; leave",
        ),
        (
            ["rollout.engine.urls=[http://a]", "rollout.engine.weights_folder=/no/where"],
            r"weights_folder=/no/where: expected a path that exists",
        ),
    ],
)
def test_settings_are_checked_before_a_model_is_built(monkeypatch, overrides, message) -> None:
    monkeypatch.setattr("ragen_pl.engines.vllm.rules.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=message):
        check(*overrides)


def test_a_python_of_another_environment_needs_no_vllm_here(monkeypatch) -> None:
    monkeypatch.setattr("ragen_pl.engines.vllm.rules.find_spec", lambda name: None)
    check("rollout.engine.python=/bin/sh")


def test_addresses_need_no_vllm_here() -> None:
    check("rollout.engine.urls=[http://127.0.0.1:8000, http://127.0.0.1:8001]")


def test_without_vllm_no_server_is_started(monkeypatch, connect) -> None:
    monkeypatch.setattr("ragen_pl.engines.vllm.rules.find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"so the run can't start a server; pip install 'ragen_pl\[vllm\]'",
    ):
        connect()
