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
from contextlib import suppress
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")
_MIB = 1024 * 1024
MAX_MESSAGE_MIB = 100
# of the server's limit on idle sessions, after which a session counts as lost: a request takes time to arrive
_PAUSE_SHARE = 0.9
_CLOSE_S = 2.0
# times that a step is asked for before a session counts as lost
_ASKED = 2
_UNAUTHORIZED = 401
_starting = threading.Lock()


class NoAnswer(ConnectionError):
    """A server has not answered in time."""


class Refused(RuntimeError):
    """A server wants another key."""


class SessionLost(ConnectionError):
    """The server has ended a session, or may have given it up. A new one can be begun."""


class Session:
    """A session with a server: one environment there, as long as the socket is open.

    Args:
        url: Address of the WebSocket.
        timeout_s: Longest wait for an answer in seconds.
        connect_timeout_s: Longest wait for a connection.
        idle_limit_s: Seconds without a request after which the server gives a session up; None where it never does. A
            server may leave the socket open, and answer later requests from an environment that it has closed.
        key: Sent as a bearer token; None for none.

    Raises:
        SessionLost: There is no connection.
        ConnectionError: What answers speaks another protocol.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        idle_limit_s: float | None = None,
        key: str | None = None,
    ) -> None:
        self.url, self.timeout_s, self.idle_limit_s = url, timeout_s, idle_limit_s
        self._headers = headers_of(key)
        self._process = os.getpid()
        self._last_request = time.monotonic()
        # what the server has sent; None for the end of the socket
        self._received: asyncio.Queue[aiohttp.WSMessage | None] = asyncio.Queue()
        self._http: aiohttp.ClientSession
        self._socket: aiohttp.ClientWebSocketResponse
        self._reader: asyncio.Task[None]
        try:
            run(url, self._connect(connect_timeout_s), timeout_s=connect_timeout_s)
        except ConnectionError as error:
            raise SessionLost(str(error)) from error

    @property
    def is_lost(self) -> bool:
        """Whether the socket is closed, or the last request is so long ago that the server may have given up."""
        return self._loss() is not None

    def ask(self, message: Mapping[str, Any], *, number: int | None = None) -> dict[str, Any]:
        """Send a message and return the answer.

        Args:
            message: The message.
            number: Number of the step where the server counts them. It takes each step once, so one without an answer
                in time is asked for again, and late answers to others are dropped.

        Raises:
            SessionLost: The session has ended, or does not answer.
            ConnectionError: There is no answer of the protocol, or none in time to a step without a number.
        """
        if (loss := self._loss()) is not None:
            raise SessionLost(f"{self.url}: {loss}")
        for _ in range(1 if number is None else _ASKED):
            try:
                return run(self.url, self._exchange(message, number), timeout_s=self.timeout_s)
            except NoAnswer as error:
                late = error
        if number is None:
            raise late
        raise SessionLost(str(late)) from late

    def close(self) -> None:
        """End the session."""
        if self._process == os.getpid():
            run(self.url, self._disconnect(), timeout_s=self.timeout_s)

    def _loss(self) -> str | None:
        """Return why the session is lost, None if it is not."""
        if self._process != os.getpid():
            return "the session belongs to another process"
        if self._reader.done():
            return self._last_words()
        pause = time.monotonic() - self._last_request
        if self.idle_limit_s is not None and pause > _PAUSE_SHARE * self.idle_limit_s:
            return (
                f"the last request was {pause:.0f} s ago, and the server gives a session up after "
                f"{self.idle_limit_s:g} s"
            )
        return None

    def _last_words(self) -> str:
        """Return why the server has ended the session, such as an error of a full one, which nothing asks for."""
        said = None if self._received.empty() else self._received.get_nowait()
        if said is not None:
            with suppress(ConnectionError, TypeError, ValueError):
                content = self._content(said)
                if content.get("type") == "error":
                    return worded(content)
        return "the server has ended the session"

    async def _connect(self, timeout_s: float) -> None:
        self._http = aiohttp.ClientSession(headers=self._headers)
        try:
            async with asyncio.timeout(timeout_s):
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

    async def _exchange(self, message: Mapping[str, Any], number: int | None) -> dict[str, Any]:
        async with asyncio.timeout(self.timeout_s):
            # such as an error of a server that is full
            unasked = None if self._received.empty() else self._content(self._received.get_nowait())
            if unasked is not None and unasked.get("type") == "error" and step_of(unasked) is None:
                return unasked
            if unasked is not None and step_of(unasked) is None:
                raise ValueError("the server sent a message that nothing had asked for")
            self._last_request = time.monotonic()
            try:
                await self._socket.send_json(message)
            # a socket that closes at this moment
            except (aiohttp.ClientError, ConnectionError) as error:
                raise SessionLost(f"{self.url}: {error}") from error
            while True:
                content = self._content(await self._received.get())
                if number is None or step_of(content) in (number, None):
                    return content

    def _content(self, answer: aiohttp.WSMessage | None) -> dict[str, Any]:
        if answer is None:
            raise SessionLost(f"{self.url}: the server has ended the session")
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise TypeError(f"found a message of type {answer.type.name}, expected a text")
        content = answer.json()
        if not isinstance(content, dict) or not isinstance(content.get("data") or {}, dict):
            raise TypeError(f"found {str(content)[:80]!r}, expected a JSON object with data")
        return content

    async def _disconnect(self) -> None:
        await self._socket.close()
        await self._http.close()
        self._reader.cancel()


def fetched(url: str, *, timeout_s: float, key: str | None) -> dict[str, Any]:
    """Return the JSON object at an address.

    Raises:
        ConnectionError: There is none.
    """

    async def fetch() -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=timeout_s)
        async with (
            aiohttp.ClientSession(headers=headers_of(key), timeout=limit) as http,
            http.get(url) as response,
        ):
            response.raise_for_status()
            content = await response.json()
        if not isinstance(content, dict):
            raise TypeError(f"found {str(content)[:80]!r}, expected a JSON object")
        return content

    return run(url, fetch(), timeout_s=timeout_s)


def worded(answer: Mapping[str, Any]) -> str:
    """Return an error of a server in words."""
    found = answer.get("data") or {}
    return f"{found.get('message', 'unknown')} ({found.get('code', 'UNKNOWN')})"


def headers_of(key: str | None) -> dict[str, str]:
    """Return the headers of a request with a key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def step_of(answer: Mapping[str, Any]) -> int | None:
    """Return the number of the step that an answer is to, None where the server counts none."""
    metadata = (answer.get("data") or {}).get("metadata")
    number = metadata.get("step") if isinstance(metadata, Mapping) else None
    return number if isinstance(number, int) else None


def run(url: str, work: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
    """Run work on the loop of this process; an error there is raised as a ConnectionError.

    Args:
        url: Address of the server, for messages.
        work: The work.
        timeout_s: Its time limit, for messages.

    Raises:
        NoAnswer: It took too long.
        Refused: The server wants another key.
        ConnectionError: Another error.
    """
    try:
        return asyncio.run_coroutine_threadsafe(work, _loop(os.getpid())).result()
    except SessionLost:
        raise
    except TimeoutError as error:
        raise NoAnswer(f"{url}: TimeoutError: no answer within {timeout_s:g} s") from error
    except aiohttp.ClientResponseError as error:
        if error.status == _UNAUTHORIZED:
            raise Refused(
                f"{url}: it wants a key; set RAGEN_PL_ENVIRONMENT_KEY to the server's"
            ) from error
        raise ConnectionError(f"{url}: {type(error).__name__}: {error}") from error
    except (aiohttp.ClientError, OSError, TypeError, ValueError) as error:
        raise ConnectionError(f"{url}: {type(error).__name__}: {error}") from error


def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of a process, which runs in a thread."""
    with _starting:
        return _started(process)


@functools.cache
def _started(process: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="openenv", daemon=True).start()
    return loop
