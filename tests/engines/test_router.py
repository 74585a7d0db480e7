"""A router before vLLM servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
from support.servers.fake_network import Router
from support.servers.fake_vllm import Server, wait
from support.servers.server_engines import collected, expected, requests, sampled

from ragen_pl.engines.errors import RolloutError


@pytest.fixture
def route() -> Iterator[Callable[..., Router]]:
    """Return a function that starts a router before servers."""
    routers: list[Router] = []

    def make(*servers: Server) -> Router:
        routers.append(Router([server.url for server in servers]))
        return routers[-1]

    yield make
    for router in routers:
        router.close()


def test_a_router_gets_the_requests_and_the_servers_all_else(start, connect, route) -> None:
    servers = [start(), start()]
    router = route(*servers)
    engine = connect(*servers, router_url=f"{router.url}/")
    assert sampled(engine) == expected() and [len(server.asked) for server in servers] == [4, 4]
    assert {path for path, _ in router.asked} == {"/inference/v1/generate"}
    sessions = [headers["X-Session-ID"] for _, headers in router.asked]
    assert sorted(sessions) == [f"0-{number}" for number in range(8)]
    # a router may read strict JSON only
    biases = {
        bias for body in servers[0].asked for bias in body["sampling_params"]["logit_bias"].values()
    }
    assert biases and max(biases) <= -1e9 and math.isfinite(min(biases))
    # a comparison of a server with the trainer asks that server
    with engine.only(servers[0].url):
        sampled(engine)
    assert [len(server.asked) for server in servers] == [12, 4] and len(router.asked) == 8


def test_responses_of_other_weights_behind_a_router_are_sampled_again(
    start, connect, route
) -> None:
    fresh, stale = start(), start()
    stale.version, stale.is_stale = "other/3/7", True
    engine = connect(fresh, router_url=route(fresh, stale).url, timeout_s=600.0)
    assert sampled(engine) == expected()
    assert engine.resent == len(stale.asked) > 0 and fresh.pushes == 1


def test_impossible_values_behind_a_router_are_sampled_again_after_the_weights(
    start, connect, route
) -> None:
    servers = [start(), start()]
    engine = connect(*servers, router_url=route(*servers).url, timeout_s=600.0)

    def spoil(choice: dict) -> None:
        choice["logprobs"]["content"][2]["logprob"] = 5.0

    servers[0].faults = [spoil]
    assert sampled(engine) == expected() and engine.resent >= 1
    wait(lambda: [server.pushes for server in servers] == [2, 2])


def test_a_request_that_a_router_refuses_ends_the_run(start, connect, route) -> None:
    server = start()
    router = route(server)
    engine = connect(server, router_url=router.url)
    server.always = {0: 404}
    with pytest.raises(RolloutError, match=rf"{router.url} refuses a request \(status 404"):
        sampled(engine, 1)


def test_a_router_sends_nothing_to_a_server_that_is_lost(start, connect, route) -> None:
    frozen, alive = start(), start()
    router = route(frozen, alive)
    engine = connect(frozen, alive, router_url=router.url, timeout_s=600.0, probe_s=0.2)
    frozen.samples.clear()
    engine.submit(requests(), keep=True)
    wait(lambda: frozen.under_way == 4)
    frozen.runs.clear()
    assert collected(engine, 8) == expected() and engine.resent >= 4
    wait(lambda: router.targets == [alive.url])
    frozen.samples.set()
    frozen.runs.set()
    wait(lambda: router.targets == [alive.url, frozen.url])
