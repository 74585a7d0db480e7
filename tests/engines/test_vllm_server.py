"""The engine on vLLM servers, with servers of this test that can fail; `tests/vllm` has the tests with vLLM."""

from __future__ import annotations

import json
import logging
import math
import re
import socket
import subprocess
import sys
import threading
import urllib.request

import numpy as np
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from fake_vllm import wait
from hydra import compose, initialize_config_dir
from module_process import FORKS
from server_engines import collected, expected, requests, sampled, seeds
from tiny_models import TEXT

from ragen_pl.config import ConfigError, check_config, config_dir
from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import generate
from ragen_pl.engines.vllm_server.engine import VLLMServerEngine
from ragen_pl.models.build import build_small_lm
from ragen_pl.models.checkpoint_weights import checkpoint_weights
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.agreement import check_engine

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
        sampled(engine, 9)
    assert [set(seeds(server).values()) for server in servers] == [{3}] * 3
    assert [len(seeds(server)) for server in servers] == [3] * 3


def test_members_of_a_group_are_together(start, connect) -> None:
    servers = [start(), start()]
    generate(connect(*servers), requests(16, members=4), keep=True)
    groups = [{seed // 4 for seed in seeds(server)} for server in servers]
    assert sorted(map(len, groups)) == [2, 2] and not groups[0] & groups[1]


def test_no_more_requests_are_under_way_than_allowed(start, connect) -> None:
    server = start()
    server.delay, server.together = 0.02, 3
    assert sampled(connect(server, concurrency=3), 12) == expected(12)
    assert server.most_under_way == 3


def test_released_requests_are_forgotten(start, connect) -> None:
    server = start()
    server.samples.clear()
    engine = connect(server)
    engine.submit(requests(), keep=True)
    wait(lambda: server.under_way == 8)
    engine.release()
    assert engine.collect() == []
    server.samples.set()
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


def abort(choice: dict) -> None:
    choice["finish_reason"] = "abort"


@pytest.mark.parametrize("fault", [429, 500, 503, "close", "garbage", "endless", abort])
def test_faults_change_no_response(start, connect, fault) -> None:
    servers = [start(), start()]
    engine = connect(*servers, timeout_s=600.0)
    servers[0].faults = [fault, fault]
    assert sampled(engine) == expected()
    assert servers[0].faults == [] and engine.resent == 2
    assert sampled(engine) == expected()
    # what comes without end is not read to its end
    assert servers[0].sent < 2**28


@pytest.mark.parametrize("count", [1, 2])
def test_late_answers_are_asked_for_again(start, connect, count) -> None:
    servers = [start() for _ in range(count)]
    # on a busy machine other answers may be late too
    engine = connect(*servers, timeout_s=600.0, retries=1000)
    servers[0].faults, engine.timeout_s = ["never"], 1.0
    assert sampled(engine) == expected()
    assert engine.resent >= 1


def test_a_burst_of_faults_loses_no_healthy_server(start, connect) -> None:
    server = start()
    engine = connect(server, timeout_s=600.0)
    server.faults = [500, "garbage", "close", 503] * 12
    assert sampled(engine, 24) == expected(24)
    assert server.faults == []


def test_attempts_come_after_growing_pauses(start, connect) -> None:
    server = start()
    server.faults = [500] * 4
    assert sampled(connect(server), 1) == expected(1)
    pauses = np.diff(server.asked_at)
    # at least half of what the request and the server wait each, longer on a busy machine
    assert (pauses >= [0.05, 0.1, 0.2, 0.4]).all()


def change(**values) -> object:
    def apply(choice: dict) -> None:
        choice |= values

    return apply


def with_logprob(value: object) -> object:
    def apply(choice: dict) -> None:
        choice["logprobs"]["content"][2]["logprob"] = value

    return apply


def with_id(value: object) -> object:
    def apply(choice: dict) -> None:
        choice["token_ids"][2] = value

    return apply


def longer(choice: dict) -> None:
    choice["token_ids"] += [11] * 96
    choice["logprobs"]["content"] += [{"logprob": -1.0}] * 96


def shorter(choice: dict) -> None:
    del choice["token_ids"][-1], choice["logprobs"]["content"][-1]


IMPOSSIBLE = {
    "nan": (with_logprob(math.nan), r"log-probs that are not finite \(nan at token 3 of 4\)"),
    "null": (with_logprob(None), "null in the place of a number"),
    "infinite": (with_logprob(math.inf), "log-probs that are not finite"),
    "banned": (with_logprob(-math.inf), "log-probs that are not finite"),
    # what a server of vLLM writes for NaN
    "written": (with_logprob(-9999.0), "log-probs of ids that are not drawn"),
    "positive": (with_logprob(5.0), "log-probs above 0"),
    "text": (with_logprob("-1"), "in the place of a number"),
    "huge": (with_logprob(10**400), "too large"),
    "missing": (change(logprobs={"content": []}), "4 ids and 0 log-probs"),
    "outside": (with_id(10**6), "ids outside the vocabulary"),
    "negative": (with_id(-1), "ids outside the vocabulary"),
    "fraction": (with_id(11.5), "11.5 in the place of a number"),
    "true": (with_id(True), "true in the place of a number"),
    "large": (with_id(2**70), "too large"),
    "longer": (longer, "more tokens than requested"),
    "empty": (change(token_ids=[], logprobs={"content": []}), "no tokens"),
    "no list": (change(token_ids="1234"), "without its ids"),
    "unfinished": (change(finish_reason="stop"), "an end without an end-of-turn token"),
    "cut": (shorter, "a length limit that it has not reached"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_values_are_sampled_again_after_the_weights(
    start, connect, caplog, name
) -> None:
    server = start()
    engine = connect(server)
    fault, message = IMPOSSIBLE[name]
    server.faults = [fault]
    assert sampled(engine, 1) == expected(1)
    assert engine.resent == 1 and re.search(message, caplog.text)
    # its keys and values may be those of the damage
    assert server.pushes == server.calls["/reset_prefix_cache"] == 2


def test_a_server_with_damaged_values_is_left_to_the_others(start, connect) -> None:
    damaged, fine = start(), start()
    engine = connect(damaged, fine)
    damaged.always = dict.fromkeys(range(8), with_logprob(math.nan))
    assert sampled(engine) == expected()


def test_ids_that_are_never_sampled_are_refused(start, connect, lm) -> None:
    server = start()
    server.faults = [with_id(lm.banned_token_ids[0])]
    assert sampled(connect(server), 1) == expected(1)
    server.faults = [with_id(lm.end_of_turn_id)]
    engine = connect(start(), server)
    with engine.only(server.url):
        assert sampled(engine, 1) == expected(1)
    assert engine.resent == 1


def test_a_response_to_another_prompt_is_sampled_again(start, connect) -> None:
    wrong, fine = start(), start()
    engine = connect(wrong, fine)
    wrong.shift = 1
    assert sampled(engine) == expected()


def test_addresses_of_the_api_are_those_of_the_server(
    start, connect, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    server = start()
    engine = connect(f"{server.url}/v1/", weights_folder="weights")
    assert engine.urls == [server.url] and sampled(engine) == expected()
    # a server has another working directory
    assert server.read.startswith(str(tmp_path / "weights"))


def test_a_dead_servers_requests_go_to_the_others(start, connect, caplog) -> None:
    dead, alive = start(), start()
    engine = connect(dead, alive)
    dead.die()
    caplog.set_level(logging.WARNING)
    assert sampled(engine) == expected()
    assert len(alive.asked) == 8
    engine.load_weights(1)
    assert sampled(engine) == expected()
    wait(lambda: f"{dead.url} is lost" in caplog.text)


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
    engine = connect(dying, alive, concurrency=4)
    dying.samples.clear()
    engine.submit(requests(16), keep=True)
    wait(lambda: dying.under_way > 0)
    dying.die()
    assert collected(engine, 16) == expected(16)


def test_a_frozen_server_is_found_by_its_probes(start, connect, caplog) -> None:
    frozen, alive = start(), start()
    engine = connect(frozen, alive, timeout_s=600.0, probe_s=0.2)
    frozen.samples.clear()
    engine.submit(requests(), keep=True)
    wait(lambda: frozen.under_way == 4)
    caplog.set_level(logging.WARNING)
    frozen.runs.clear()
    assert collected(engine, 8) == expected()
    assert "probes have failed: no answer within 0.2 s" in caplog.text or engine.resent >= 4
    frozen.samples.set()
    frozen.runs.set()
    # it is used again with the weights that it has
    wait(lambda: bool(sampled(engine)) and seeds(frozen).total() > 8)
    assert frozen.pushes == 1


def test_probes_find_a_server_that_has_been_started_again(start, connect) -> None:
    server = start()
    engine = connect(server, probe_s=0.2)
    server.version = "default"
    wait(lambda: server.pushes == 2)
    assert sampled(engine) == expected()


def test_all_servers_dead_is_reported_with_their_addresses(start, connect) -> None:
    servers = [start(), start()]
    engine = connect(*servers, timeout_s=5.0)
    for server in servers:
        server.die()
    message = r"no server has answered for 5 s \(.*{}: .*{}: .*\); start one again, or raise"
    with pytest.raises(
        RolloutError, match=message.format(servers[0].url, servers[1].url)
    ) as caught:
        sampled(engine)
    assert "\n" not in str(caught.value)
    with pytest.raises(RolloutError, match="no server has answered"):
        engine.load_weights(1)


def test_all_servers_may_come_back(start, connect) -> None:
    server = start()
    engine = connect(server, timeout_s=600.0)
    server.die()
    engine.submit(requests(), keep=True)
    wait(lambda: engine.resent > 0)
    again = start(port=server.server_port)
    assert collected(engine, 8) == expected()
    assert again.pushes == 1


def test_a_request_that_always_fails_ends_the_run(start, connect) -> None:
    server = start()
    engine = connect(server, retries=2, timeout_s=600.0)
    server.always = {0: 500}
    engine.submit(requests(2), keep=True)
    wait(lambda: seeds(server)[0] >= 2)
    # others are answered meanwhile, so the request is at fault
    while True:
        try:
            answers = engine.collect(wait=False)
        except RolloutError as error:
            assert "retries=2: a request failed 3 times" in str(error)
            break
        assert all(session != 0 for session, _ in answers)
        if answers or not seeds(server)[1]:
            engine.submit(requests(3)[1:], keep=True)
    assert seeds(server)[0] == 3


def test_while_none_is_answered_requests_have_more_attempts(start, connect) -> None:
    server = start()
    server.faults = [500] * 3
    assert sampled(connect(server, retries=0, timeout_s=600.0), 1) == expected(1)
    engine = connect(server, retries=0)
    server.asked.clear()
    server.always, engine.timeout_s = {0: 500}, 0.5
    with pytest.raises(RolloutError, match=r"retries=0: a request failed \d+ times, the last time"):
        sampled(engine, 1)
    # at least twice, however late the first attempt has failed
    assert seeds(server)[0] >= 2


def test_a_server_that_refuses_a_request_leaves_it_to_the_others(start, connect) -> None:
    stray, fine = start(), start()
    engine = connect(stray, fine, retries=0)
    stray.always = dict.fromkeys(range(8), 404)
    assert sampled(engine) == expected()
    assert max(seeds(stray).values()) == 1


def test_a_request_that_all_servers_refuse_ends_the_run(start, connect) -> None:
    servers = [start(), start()]
    engine = connect(*servers)
    for server in servers:
        server.always = {0: 400}
    message = r"{0}, {1} refuse a request \(status 400: not now\)|{1}, {0} refuse a request"
    with pytest.raises(RolloutError, match=message.format(servers[0].url, servers[1].url)):
        sampled(engine, 1)
    with (
        engine.only(servers[0].url),
        pytest.raises(RolloutError, match=rf"{servers[0].url} refuses a request \(status 400"),
    ):
        sampled(engine, 1)


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
    if rank == 1:
        for url in urls:
            body = json.dumps({"new_version": "default"}).encode()
            urllib.request.urlopen(f"{url}/update_weight_version", data=body).close()
    dist.barrier()
    assert sampled(engine) == expected()
    dist.barrier()
    engine.close()
    dist.destroy_process_group()


@pytest.mark.slow
def test_one_rank_checks_each_server_and_the_first_hands_over_weights(start, tmp_path) -> None:
    servers = [start() for _ in range(2)]
    arguments = (str(tmp_path), [server.url for server in servers])
    mp.start_processes(use_servers, arguments, nprocs=2, start_method=FORKS.get_start_method())
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
        ([], r"rollout\.engine\.urls=\[\]: vllm is not installed, .*ragen_pl\.install_vllm"),
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
        ModuleNotFoundError, match="so the run can't start a server; python -m ragen"
    ):
        connect()
