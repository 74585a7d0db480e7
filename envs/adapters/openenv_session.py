"""Sessions with OpenEnv servers over WebSockets, all on one event loop in a thread of its own.

The loop reads every socket at all times: a server's pings are answered while nobody waits for a step, and a socket
that the server closes is known before the next request.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")
_MIB = 1024 * 1024
MAX_MESSAGE_MIB = 100
# of the server's limit on idle sessions, after which a session counts as lost: a request takes time to arrive
_PAUSE_SHARE = 0.9
_CLOSE_S = 2.0
_starting = threading.Lock()


class SessionLost(ConnectionError):
    """The server has ended a session, or may have given it up. A new one can be begun."""


class Session:
    """A session with a server: one environment there, as long as the socket is open.

    Args:
        url: address of the WebSocket.
        timeout_s: longest wait for a connection and for an answer in seconds.
        idle_limit_s: seconds without a request after which the server gives a session up; None where it never does. A
            server may leave the socket open, and answer later requests from an environment that it has closed.

    Raises:
        ConnectionError: there is no connection.
    """

    def __init__(self, url: str, *, timeout_s: float, idle_limit_s: float | None = None) -> None:
        self.url, self.timeout_s, self.idle_limit_s = url, timeout_s, idle_limit_s
        self._process = os.getpid()
        self._last_request = time.monotonic()
        # what the server has sent; None for the end of the socket
        self._received: asyncio.Queue[aiohttp.WSMessage | None] = asyncio.Queue()
        self._http: aiohttp.ClientSession
        self._socket: aiohttp.ClientWebSocketResponse
        self._reader: asyncio.Task[None]
        self._run(self._connect())

    @property
    def is_lost(self) -> bool:
        """Whether the socket is closed, or the last request is so long ago that the server may have given up."""
        return self._loss() is not None

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the answer.

        Raises:
            SessionLost: the session has ended.
            ConnectionError: there is no answer in time, or none of the protocol.
        """
        if (loss := self._loss()) is not None:
            raise SessionLost(f"{self.url}: {loss}")
        return self._run(self._exchange(message))

    def close(self) -> None:
        """End the session."""
        if self._process == os.getpid():
            self._run(self._disconnect())

    def _loss(self) -> str | None:
        """Return why the session is lost, None if it is not."""
        if self._process != os.getpid():
            return "the session belongs to another process"
        if self._reader.done():
            return "the server has ended the session"
        pause = time.monotonic() - self._last_request
        if self.idle_limit_s is not None and pause > _PAUSE_SHARE * self.idle_limit_s:
            return (
                f"the last request was {pause:.0f} s ago, and the server gives a session up after "
                f"{self.idle_limit_s:g} s"
            )
        return None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the loop; an error there is raised as a ConnectionError."""
        try:
            return asyncio.run_coroutine_threadsafe(work, _loop(self._process)).result()
        except SessionLost:
            raise
        except TimeoutError as error:
            raise ConnectionError(
                f"{self.url}: TimeoutError: no answer within {self.timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError, TypeError, ValueError) as error:
            raise ConnectionError(f"{self.url}: {type(error).__name__}: {error}") from error

    async def _connect(self) -> None:
        self._http = aiohttp.ClientSession()
        try:
            async with asyncio.timeout(self.timeout_s):
                self._socket = await self._http.ws_connect(
                    self.url,
                    max_msg_size=MAX_MESSAGE_MIB * _MIB,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
                    # a machine that is gone is noticed; a server that computes a step may be silent for `timeout_s`
                    heartbeat=2 * self.timeout_s,
                )
        except BaseException:
            await self._http.close()
            raise
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Receive messages; aiohttp answers pings meanwhile."""
        try:
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.ERROR:
                    break
                self._received.put_nowait(message)
        finally:
            self._received.put_nowait(None)

    async def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(self.timeout_s):
            # such as an error of a server that is full
            unasked = None if self._received.empty() else self._received.get_nowait()
            self._last_request = time.monotonic()
            try:
                await self._socket.send_json(message)
            # a socket that closes at this moment
            except (aiohttp.ClientError, ConnectionError) as error:
                raise SessionLost(f"{self.url}: {error}") from error
            answer = unasked or await self._received.get()
        if answer is None:
            raise SessionLost(f"{self.url}: the server has ended the session")
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise TypeError(f"found a message of type {answer.type.name}, expected a text")
        content = answer.json()
        if not isinstance(content, dict) or not isinstance(content.get("data") or {}, dict):
            raise TypeError(f"found {str(content)[:80]!r}, expected a JSON object with data")
        if unasked is not None and content.get("type") != "error":
            raise ValueError("the server sent a message that nothing had asked for")
        return content

    async def _disconnect(self) -> None:
        await self._socket.close()
        await self._http.close()
        self._reader.cancel()


def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of a process, which runs in a thread."""
    with _starting:
        return _started(process)


@functools.cache
def _started(process: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="openenv", daemon=True).start()
    return loop
