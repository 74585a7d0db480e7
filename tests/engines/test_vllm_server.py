"""The engine on vLLM servers, with servers of this test that can fail; `tests/vllm` has the tests with vLLM."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from support.servers.fake_vllm import wait
from support.servers.server_engines import expected, requests, sampled, seeds

from ragen_pl.engines.errors import RolloutError
from ragen_pl.engines.protocol import generate
from ragen_pl.models.checkpoint_weights import checkpoint_weights

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
        "import os, signal, sys; from ragen_pl.base.files import OwnFolder; "
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
        "import sys; from ragen_pl.base.files import OwnFolder; "
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
