"""Faults of vLLM servers: late, impossible and missing answers, servers that die, freeze and come back."""

from __future__ import annotations

import logging
import math
import re

import numpy as np
import pytest
from support.servers.fake_vllm import wait
from support.servers.server_engines import collected, expected, requests, sampled, seeds

from ragen_pl.engines.errors import RolloutError

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
    # an endless answer is not read to its end
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
    # vLLM's servers write NaN so
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
