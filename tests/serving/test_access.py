"""One rule of host, origin and key: the endpoint, the environments' server and the live view."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from ragen_pl.agent_programs.serving.server import AgentServer
from ragen_pl.agent_programs.serving.session import Session
from ragen_pl.base.records import write_records
from ragen_pl.environments.classes import environment_maker
from ragen_pl.environments.serving import EnvironmentServer, ServerSettings
from ragen_pl.viewing.watch import RunWatch

KEY = "k" * 32


@contextmanager
def running(application: web.Application) -> Iterator[int]:
    """Run an application in a thread and give its port."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    opened = socket.create_server(("127.0.0.1", 0))

    async def start() -> None:
        await runner.setup()
        await web.SockSite(runner, opened).start()

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield opened.getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextmanager
def environments(key: str | None) -> Iterator[int]:
    server = EnvironmentServer(
        environment_maker("envs.frozen_lake.FrozenLake"),
        name="lake",
        target="envs.frozen_lake.FrozenLake",
        timeout_s=None,
        settings=ServerSettings(port=0, sessions=2),
        key=key,
    )
    server.prepare()
    with running(server.app()) as port:
        yield port


@contextmanager
def endpoint(key: str | None) -> Iterator[int]:
    server = AgentServer()
    if key is None:
        server.open_to_all(Session(server.loop))
    else:
        server.open(Session(server.loop, key=key))
    try:
        yield int(server.url.rpartition(":")[2].partition("/")[0])
    finally:
        server.close()


@contextmanager
def view(folder: Path) -> Iterator[int]:
    with running(RunWatch([folder]).application()) as port:
        yield port


def answer(port: int, path: str, *headers: bytes) -> tuple[int, bytes]:
    """Return the status and the body of an answer to a request with these headers, byte for byte."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as stream:
        lines = [f"GET {path} HTTP/1.1".encode(), *headers, b"Connection: close", b"", b""]
        stream.sendall(b"\r\n".join(lines))
        received = b"".join(iter(lambda: stream.recv(1 << 16), b""))
    return int(received.split(b" ", 2)[1]), received.partition(b"\r\n\r\n")[2]


HERE = b"Host: 127.0.0.1"
REFUSED = {
    "other host": [b"Host: evil.example"],
    "broken host": [b"Host: [::"],
    "broken brackets": [b"Host: ]["],
    "host with a user": [b"Host: evil.example@127.0.0.1"],
    "host of other bytes": [b"Host: \xff\xfe"],
    "other origin": [HERE, b"Origin: https://evil.example"],
    "no origin": [HERE, b"Origin: null"],
    "broken origin": [HERE, b"Origin: http://[::"],
    "two origins": [HERE, b"Origin: http://127.0.0.1", b"Origin: https://evil.example"],
    "other site": [HERE, b"Sec-Fetch-Site: cross-site"],
}
UPGRADE = [
    b"Upgrade: websocket",
    b"Connection: Upgrade",
    b"Sec-WebSocket-Version: 13",
    b"Sec-WebSocket-Key: " + b"A" * 22 + b"==",
]


@pytest.mark.parametrize("kind", ["environments", "endpoint", "view"])
def test_without_keys_other_hosts_and_origins_are_refused(kind, tmp_path, caplog):
    opened: dict[str, Callable] = {
        "environments": lambda: environments(None),
        "endpoint": lambda: endpoint(None),
        "view": lambda: view(tmp_path),
    }
    paths = {
        "environments": ["/metadata", "/schema", "/health", "/ws"],
        "endpoint": ["/v1/models"],
        "view": ["/runs"],
    }[kind]
    with caplog.at_level(logging.ERROR), opened[kind]() as port:
        for path in paths:
            upgrade = UPGRADE if path == "/ws" else []
            for name, headers in REFUSED.items():
                status, body = answer(port, path, *headers, *upgrade)
                assert status in (400, 403), (path, name, status, body)
            others = [
                b"Authorization: Bearer \xff\xfe",
                b"Authorization: \xc3\x28",
                b"Cookie: \xff",
            ]
            for host in (HERE, b"Host: localhost:1", b"Host: [::1]:5"):
                assert path == "/ws" or answer(port, path, host, *others)[0] == 200
    assert not caplog.records


@pytest.mark.parametrize("kind", ["environments", "endpoint"])
def test_a_right_key_is_enough_and_a_wrong_one_is_401(kind, caplog):
    opened, path = {
        "environments": (environments, "/metadata"),
        "endpoint": (endpoint, "/v1/models"),
    }[kind]
    with caplog.at_level(logging.ERROR), opened(KEY) as port:
        for scheme in (b"Bearer", b"bearer", b"BEARER "):
            right = b"Authorization: " + scheme + b" " + KEY.encode()
            assert answer(port, path, b"Host: far.away", right)[0] == 200
        for wrong in (
            b"",
            b"Bearer",
            b"Bearer x",
            b"Bearer \xff\xfe",
            b"Basic " + KEY.encode(),
            KEY.encode() * 100,
        ):
            assert answer(port, path, HERE, b"Authorization: " + wrong)[0] == 401
        assert answer(port, path, HERE)[0] == 401
    assert not caplog.records


LINES = [
    "[" * 100_000,
    '{"schema": 2}',
    "7",
    '{"schema": 2, "group": 0, "seed": 0, "status": "x", "success": true, "turns": [7], "final_images": []}',
    '{"schema": 2, "group": {}, "seed": 0, "status": "x", "success": true, "turns": [], "final_images": []}',
    '{"schema": 2, "group": 0, "seed": 0, "status": "x", "success": true, "turns": {}, "final_images": [{}]}',
    '{"schema": 2, "group": 0, "seed": 0, "status": [], "success": 1, "turns": null, "final_images": 3}',
    '{"schema": 2, "group": 0, "info": ' + '{"a":' * 900 + "1" + "}" * 900 + "}",
    "\xff\xfe",
]
NAMES = "abcdefghijklmnop"
DOUBLED = [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in itertools.pairwise(NAMES)]
SETTINGS = [
    "\n".join(["a: &a [x, x]", *DOUBLED]),
    "env: " + "[" * 5000,
    "env: {name: " + "{a: " * 3000,
    "? " * 2000,
    "env: " + "1:" * 100_000 + "1",
    'env: !!float "' + "1:" * 60_000 + '1"',
    'env: !!int "0x' + "f" * 6_000 + '"',
    "env: !!python/object/apply:os.system [id]",
    "- 1",
    "\x00\x01",
]  # fmt: skip


def test_the_live_view_answers_whatever_a_folder_holds(tmp_path, caplog):
    for number, text in enumerate(SETTINGS):
        (tmp_path / f"settings{number}").mkdir()
        (tmp_path / f"settings{number}" / "config.yaml").write_text(text)
    for number, line in enumerate(LINES):
        run = tmp_path / f"records{number}"
        place = write_records([], run / "trajectories" / "iteration_0001")
        place.write_text(line + "\n", encoding="latin-1")
        (run / "config.yaml").write_text("env: {name: x}\n")
        (run / "plots").mkdir()
        # runs of an earlier version have rows
        rows = "plots/rows.jsonl" if number % 2 else "metrics.jsonl"
        for name in (rows, "collapse.jsonl"):
            deep = '{"iteration": 1, "elapsed_s": 1, "message": ' + "[" * 150 + "]" * 150 + "}"
            (run / name).write_text(
                "\n".join([deep, line, "null", '{"iteration": "x"}', "9" * 5000])
            )
    with caplog.at_level(logging.ERROR), view(tmp_path) as port:
        assert answer(port, "/runs", HERE)[0] == 200
        for number in range(len(SETTINGS)):
            names = f"run=settings{number}&run=records0"
            assert answer(port, f"/differences?{names}", HERE)[0] == 200
        for number in range(len(LINES)):
            assert answer(port, f"/run?run=records{number}", HERE)[0] == 200
            path = f"/episodes?run=records{number}&records=trajectories/iteration_0001"
            status, body = answer(port, path, HERE)
            assert status == 422 and b"Traceback" not in body
    assert not caplog.records
