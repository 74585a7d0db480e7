"""The engine on doubles of vLLM servers: fixtures, requests, and the responses that a double gives to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from support.servers.fake_vllm import Server

from ragen_pl.engines.protocol import GenerationRequest, Prompt, generate
from ragen_pl.engines.vllm_server.engine import VLLMServerEngine
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.modules.policy import PolicyModule


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
            **({"urls": urls, "max_tokens": 256, "timeout_s": 60.0} | settings),
        )
        engines.append(engine)
        if version is not None:
            engine.load_weights(version)
        return engine

    yield make
    for engine in engines:
        engine.close()


def requests(
    count: int = 8, *, tokens: int = 4, members: int | None = None
) -> list[GenerationRequest]:
    """Return requests with the session as seed, in groups of so many members."""
    ids = np.array([11, 12, 13])
    prompt = Prompt(ids=ids, unexpanded_ids=ids)
    return [
        GenerationRequest(
            session=n,
            prompt=prompt,
            max_tokens=tokens,
            temperature=1.0,
            seed=n,
            group=None if members is None else n // members,
        )
        for n in range(count)
    ]


def collected(engine: VLLMServerEngine, count: int) -> list[list[int]]:
    """Return the responses to the sessions 0, 1, ... that have been submitted."""
    found: dict[int, list[int]] = {}
    while len(found) < count:
        found |= {session: one.ids.tolist() for session, one in engine.collect()}
    return [found[session] for session in range(count)]


def seeds(server: Server) -> Counter[int]:
    """Return how often each session has asked a server."""
    return Counter(body["sampling_params"]["seed"] for body in server.asked)


def sampled(engine: VLLMServerEngine, count: int = 8) -> list[list[int]]:
    return [one.ids.tolist() for one in generate(engine, requests(count), keep=True)]


def expected(count: int = 8) -> list[list[int]]:
    return [np.random.default_rng(seed).integers(10, 50, 4).tolist() for seed in range(count)]
