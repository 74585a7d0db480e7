"""The pool of vLLM servers as the ranks use it: who watches, who hands weights over, who takes a request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import aiohttp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.servers.fake_vllm import Server as FakeServer

from ragen_pl.engines.protocol import GenerationRequest, Prompt
from ragen_pl.engines.vllm_server.access import KEY_VARIABLE, KeyRequired
from ragen_pl.engines.vllm_server.pool import ServerPool
from ragen_pl.engines.vllm_server.requirements import Requirements
from ragen_pl.engines.vllm_server.routing import Routing
from ragen_pl.engines.vllm_server.server import (
    InvalidAnswerError,
    Server,
    ServerLostError,
    ServerState,
    UnavailableError,
)
from ragen_pl.engines.vllm_server.weights import WrittenWeights

PRESENT = WrittenWeights("/nowhere", "run/1/0")


# ---- the state of a server


def test_a_failure_from_before_a_server_was_found_again_is_ignored() -> None:
    server = Server("http://a", None, 1.0)
    server.become_ready()
    assert server.mark_lost("first", loss_count=0) and server.state is ServerState.LOST
    # of the same requests
    assert not server.mark_lost("second", loss_count=0) and server.loss_count == 1
    server.become_ready()
    assert not server.mark_lost("late", loss_count=0) and server.is_ready
    assert server.mark_lost("new", loss_count=1) and server.state is ServerState.LOST


def test_a_damaged_response_is_remembered_until_the_weights_are_there() -> None:
    server = Server("http://a", None, 1.0)
    server.become_ready()
    server.mark_lost("first", loss_count=0)
    server.mark_lost("damaged", loss_count=0, must_reload=True)
    assert server.must_reload
    server.become_ready()
    assert not server.must_reload


# ---- ranks


@pytest.fixture
def fake(lm):
    server = FakeServer(lm)
    server.version = PRESENT.label
    yield server
    server.die()


def run(
    fake: FakeServer, bundle, work: Callable, *, rank: int, requirements: type = Requirements
) -> None:
    """Run a coroutine with the pool of a rank, which has the weights of the server."""

    async def inside() -> None:
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            pool = ServerPool(
                [Server(fake.url, session, 30.0)],
                requirements(bundle, torch.float32, 256),
                timeout_s=30.0,
                retries=0,
                probe_s=0.1,
                probe_failures=3,
                rank=rank,
                ranks=2,
            )
            pool.note_checked()
            await pool.begin(PRESENT, [fake.url])
            try:
                await asyncio.wait_for(work(pool, pool.servers[0]), timeout=60)
            finally:
                await pool.end()

    asyncio.run(inside())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_other_ranks_wait_for_the_first_to_hand_over_the_weights(fake, lm) -> None:
    async def work(pool: ServerPool, server: Server) -> None:
        fake.version = "default"
        pool.note_failure(server, UnavailableError("closed"), loss_count=server.loss_count)
        await until(lambda: fake.calls["/weight_info"] >= 3)
        assert not server.is_ready and "first rank" in server.reason
        fake.version = PRESENT.label
        await until(lambda: server.is_ready)

    run(fake, lm, work, rank=1)
    assert fake.pushes == 0 and fake.calls["/pause"] == 0 and fake.calls["/server_info"] == 0


def test_another_rank_marks_a_damaged_server_for_the_first(fake, lm) -> None:
    async def work(pool: ServerPool, server: Server) -> None:
        pool.note_failure(server, InvalidAnswerError("nan"), loss_count=server.loss_count)
        await until(lambda: fake.version == "replacing")
        assert not server.is_ready
        fake.version = PRESENT.label
        await until(lambda: server.is_ready)

    run(fake, lm, work, rank=1)
    assert fake.pushes == 0


def test_the_first_rank_replaces_the_weights_of_a_marked_server(fake, lm, tmp_path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")

    async def work(pool: ServerPool, server: Server) -> None:
        pool.weights = WrittenWeights(str(tmp_path), PRESENT.label)
        # by its probes: this rank waits for nothing
        fake.version = "replacing"
        await until(lambda: fake.pushes == 1 and server.is_ready)

    run(fake, lm, work, rank=0)
    assert fake.version == PRESENT.label and fake.calls["/server_info"] == 0


def test_other_ranks_probe_while_they_wait_for_responses(fake, lm) -> None:
    async def work(pool: ServerPool, server: Server) -> None:
        fake.samples.clear()
        await asyncio.sleep(0.3)
        assert fake.calls["/health"] == 0
        body = {"token_ids": [11], "sampling_params": {"max_tokens": 4, "seed": 0}}
        call = asyncio.ensure_future(server.respond(body, timeout_s=60, max_bytes=2**20))
        await until(lambda: fake.calls["/health"] >= 2)
        fake.samples.set()
        await call

    run(fake, lm, work, rank=1)


@pytest.mark.parametrize("steps", range(5))
def test_a_watch_ends_at_the_moment_at_which_its_server_is_lost(fake, lm, steps) -> None:
    async def work(pool: ServerPool, server: Server) -> None:
        await asyncio.sleep(0.01)
        pool.note_failure(server, UnavailableError("closed"), loss_count=server.loss_count)
        for _ in range(steps):
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await pool.end()

    run(fake, lm, work, rank=1)


class Faulty(Requirements):
    """Raises what nobody expects."""

    async def check(self, server: Server) -> None:
        raise LookupError("no key")


def test_requests_raise_what_has_ended_the_watch_of_a_server(fake, lm) -> None:
    async def work(pool: ServerPool, server: Server) -> None:
        fake.version = "default"
        with pytest.raises(LookupError, match="no key"):
            while True:
                await pool.server_for(0, refusals={})
                await asyncio.sleep(0.01)

    run(fake, lm, work, rank=0, requirements=Faulty)


@pytest.mark.parametrize(("rank", "checked"), [(0, 1), (1, 0)])
def test_each_server_is_checked_by_one_rank(fake, lm, rank, checked) -> None:
    async def work(pool: ServerPool, server: Server) -> None:
        server.state = ServerState.NEW
        await pool.check()

    run(fake, lm, work, rank=rank)
    assert fake.calls["/tokenize"] == 2 * checked and fake.calls["/detokenize"] == checked


def test_a_request_that_a_server_has_failed_goes_to_another_that_is_ready(fake, lm) -> None:
    async def work(pool: ServerPool, server: Server) -> None:
        (other,) = ready(1)
        pool.servers.append(other)
        pool.routing = Routing(pool.servers)
        pool.routing.place([request(0)])
        assert await pool.server_for(0, refusals={}) is server
        assert await pool.server_for(0, refusals={}, failed={server.url}) is other
        other.mark_lost("gone", loss_count=0)
        assert await pool.server_for(0, refusals={}, failed={server.url}) is server

    run(fake, lm, work, rank=0)


# ---- time


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose waits take no time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        select = self._selector.select

        def jump(timeout: float | None) -> list:
            events = select(0)
            if not events and timeout:
                # more than what a float of this size can lose
                self.now += timeout + 1e-6
            return events

        self._selector.select = jump

    def time(self) -> float:
        return self.now


class Silent(Server):
    """Takes all calls and answers none, as a machine without power."""

    async def call(self, method: str, path: str, body=None, *, timeout_s=None, **_: object):
        await asyncio.sleep(timeout_s or 30.0)
        raise UnavailableError("no answer")


def test_requests_to_a_machine_without_power_go_elsewhere_within_20_s(lm) -> None:
    async def inside() -> float:
        loop = asyncio.get_running_loop()
        server = Silent("http://a", None, 300.0)
        pool = ServerPool(
            [server],
            Requirements(lm, torch.float32, 256),
            timeout_s=300.0,
            retries=0,
            probe_s=5.0,
            probe_failures=3,
        )
        await pool.begin(PRESENT, [server.url])
        begun = loop.time()
        with pytest.raises(ServerLostError):
            await server.respond({}, timeout_s=300.0, max_bytes=2**20)
        found = loop.time() - begun
        await pool.end()
        return found

    loop = Clock()
    try:
        assert loop.run_until_complete(inside()) < 20.1
    finally:
        loop.close()


# ---- routing


def ready(count: int) -> list[Server]:
    servers = [Server(f"http://{number}", None, 1.0) for number in range(count)]
    for server in servers:
        server.become_ready()
    return servers


def request(session: int, group: int | None = None) -> GenerationRequest:
    ids = np.array([1])
    return GenerationRequest(
        session=session,
        prompt=Prompt(ids=ids, unexpanded_ids=ids),
        max_tokens=1,
        temperature=1.0,
        seed=0,
        group=group,
    )


@given(servers=st.integers(1, 7), groups=st.integers(1, 12), members=st.integers(1, 9))
def test_servers_get_equally_many_sessions(servers, groups, members) -> None:
    pool = ready(servers)
    routing = Routing(pool)
    sessions = range(groups * members)
    routing.place([request(session, session // members) for session in sessions])
    homes = [routing.server_of(session, among=set(pool)) for session in sessions]
    most = -(-len(sessions) // servers)
    assert max(Counter(homes).values()) <= most
    # a group is divided only where a server would have more than its part
    split = sum(
        len(set(homes[group * members : (group + 1) * members])) > 1 for group in range(groups)
    )
    assert split <= servers
    if most % members == 0:
        assert split == 0
    routing.place([request(session, session // members) for session in sessions])
    assert homes == [routing.server_of(session, among=set(pool)) for session in sessions]


@given(servers=st.integers(1, 8), ranks=st.integers(1, 16), episodes=st.integers(1, 8))
def test_ranks_with_few_sessions_use_different_servers(servers, ranks, episodes) -> None:
    pool = ready(servers)
    used: Counter[Server] = Counter()
    for rank in range(ranks):
        routing = Routing(pool, rank=rank, ranks=ranks)
        routing.place([request(session) for session in range(episodes)])
        used.update(routing.server_of(session, among=set(pool)) for session in range(episodes))
    assert len(used) >= min(servers, episodes)
    if ranks >= servers:
        assert len(used) == servers


def test_another_server_stands_in_while_the_home_is_lost() -> None:
    first, second, third = ready(3)
    routing = Routing([first, second, third])
    routing.place([request(session) for session in range(3)])
    home = routing.server_of(0, among={first, second, third})
    others = {first, second, third} - {home}
    stand_in = routing.server_of(0, among=others)
    assert routing.server_of(0, among=others) is stand_in is not home
    assert routing.server_of(0, among={first, second, third}) is home


# ---- the key of the run's own server


def test_a_request_without_the_key_is_refused(monkeypatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    passed: list[str] = []
    sent: list[dict] = []

    async def app(scope, receive, send) -> None:
        passed.append(scope["type"])

    async def send(message: dict) -> None:
        sent.append(message)

    middleware = KeyRequired(app)

    def ask(kind: str, *headers: tuple[bytes, bytes]) -> None:
        asyncio.run(middleware({"type": kind, "headers": headers}, None, send))

    ask("http", (b"authorization", b"Bearer secret"))
    asyncio.run(middleware({"type": "lifespan"}, None, send))
    assert passed == ["http", "lifespan"] and sent == []
    ask("http")
    ask("http", (b"authorization", b"Bearer secret "))
    assert [message.get("status") for message in sent] == [401, None, 401, None]
    ask("websocket", (b"authorization", b"Bearer"))
    assert sent[-1]["type"] == "websocket.close" and len(passed) == 2
