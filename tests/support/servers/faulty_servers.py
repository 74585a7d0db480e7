"""Servers of environments that lose answers and sessions, and can be killed and started again."""

from __future__ import annotations

import asyncio
import json
import random
import socket as sockets
import threading
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from aiohttp import web

import envs  # noqa: F401 - registers the environments
import visual_envs  # noqa: F401
from ragen_pl.environments.classes import environment_maker
from ragen_pl.environments.serving import EnvironmentServer, ServerSettings

LAKE = "envs:ragen/FrozenLake-v0"
SLIPPERY = {"slip_probability": 0.3}


class FaultyServer(EnvironmentServer):
    """Loses each answer to a step with a chance, and the session of each step with another one.

    Without `loses_in_a_row` the answer to a repeated step comes.
    """

    lost_answers = lost_sessions = 0.0
    loses_in_a_row = True
    lost = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.luck = random.Random(7)
        # sessions whose last answer was lost
        self.silent: set[Any] = set()

    async def say(self, session: Any, message: dict[str, Any]) -> None:
        is_step = message["data"].get("metadata", {}).get("step", 0) > 0
        if is_step and self.luck.random() < self.lost_sessions:
            self.lost += 1
            session.socket._req.transport.abort()
        elif (
            is_step
            and (self.loses_in_a_row or session not in self.silent)
            and self.luck.random() < self.lost_answers
        ):
            self.lost += 1
            self.silent.add(session)
        else:
            self.silent.discard(session)
            await super().say(session, message)


class Served:
    """A server in a thread of this process, that can be killed and started again at the same port."""

    def __init__(
        self,
        *,
        target: str = LAKE,
        kwargs: dict[str, Any] | None = None,
        key: str | None = None,
        **limits: Any,
    ) -> None:
        with sockets.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        settings = ServerSettings(port=self.port, **({"sessions": 64} | limits))
        make = partial(environment_maker(target), **(SLIPPERY if kwargs is None else kwargs))
        self._new = partial(
            FaultyServer,
            make,
            name="test",
            target=target,
            timeout_s=20.0,
            settings=settings,
            key=key,
        )
        self.servers: list[FaultyServer] = []
        self.start()

    @property
    def server(self) -> FaultyServer:
        return self.servers[-1]

    def count(self, name: str) -> int:
        return sum(server.counts[name] for server in self.servers)

    def start(self) -> None:
        if self.servers:
            before = self.server
            self.servers.append(self._new())
            self.server.lost_answers = before.lost_answers
            self.server.lost_sessions = before.lost_sessions
        else:
            self.servers.append(self._new())
        self.server.prepare()
        self._loop, ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(60)

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            self._end = asyncio.Event()
            self._runner = web.AppRunner(self.server.app(), access_log=None, shutdown_timeout=1.0)
            await self._runner.setup()
            await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
            ready.set()
            await self._end.wait()
            await self._runner.cleanup()

        self._loop.run_until_complete(serve())
        self._loop.close()

    def kill(self) -> None:
        """End all connections at once, as a killed process does, and lose the environments."""

        def end() -> None:
            for site in list(self._runner.sites):
                site._server.close()
            for session in list(self.server.open_sessions):
                if (transport := session.socket._req.transport) is not None:
                    transport.abort()
            self._end.set()

        self._loop.call_soon_threadsafe(end)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(30)

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/health", timeout=30) as answer:
            return json.load(answer)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("RAGEN_PL_ENVIRONMENT_KEY", raising=False)
    started: list[Served] = []

    def start(**settings: Any) -> Served:
        started.append(Served(**settings))
        return started[-1]

    yield start
    for one in started:
        one.close()
