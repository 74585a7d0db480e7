"""Bodies of HTTP requests, read within limits, and the events that other connections bring."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

from aiohttp import web

from ragen_pl.agent_programs.serving.errors import RequestError
from ragen_pl.agent_programs.serving.session import Event, EventKind, Session

MAX_BODY = 32 * 1024 * 1024
_SMALL = 64 * 1024


async def read_body(request: web.Request, *, timeout_s: float) -> bytes:
    """Return the body of a request.

    Args:
        request: The request.
        timeout_s: Longest time.

    Raises:
        RequestError: It is too long or too slow, or it is compressed.
    """
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise RequestError(400, f"Content-Encoding={encoding!r} is not supported; leave it out")
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestError(
            413, f"the body has more than {MAX_BODY} bytes", code="body_too_large"
        ) from error
    except TimeoutError as error:
        raise RequestError(
            400, f"the body took longer than {timeout_s:g} s", code="body_too_slow"
        ) from error


def is_small(data: bytes) -> bool:
    """Return whether a body is read in no time: a short one without images."""
    return len(data) <= _SMALL and b"image" not in data


def retries_of(request: web.Request) -> int:
    """Return how often an SDK has sent a request before."""
    count = request.headers.get("x-stainless-retry-count", "0")
    return int(count) if count.isdecimal() and len(count) < 9 else 0


def watch_exit(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, session: Session
) -> None:
    """Put an `EXIT` event into a session once a connection has brought an outcome and is closed."""
    received = bytearray()
    connection.setblocking(False)

    def read() -> None:
        try:
            part = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        received.extend(part)
        if part:
            return
        loop.remove_reader(connection)
        connection.close()
        outcome: dict[str, Any] = {"error": "its supervisor has ended"}
        with suppress(ValueError):
            outcome = json.loads(bytes(received))
        session.events.put(Event(EventKind.EXIT, outcome=outcome))

    loop.add_reader(connection, read)
