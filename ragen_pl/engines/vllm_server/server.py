"""One vLLM server: its state, its HTTP calls and their errors."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

import aiohttp

from ragen_pl.base.seeding import derive_seed

# seconds: the shortest and the longest pause between attempts, and the wait for an answer that needs no computing
_FIRST_PAUSE, _LONGEST_PAUSE, _ANSWERS_IN = 0.1, 8.0, 30.0
# seconds: the wait for a connection
_CONNECTS_IN = 10.0
CONTROL_BYTES = 64 * 2**20
"""Largest answer to a call that samples nothing. The text of a vocabulary of 256k ids has about 2 MB."""
_ERROR_BYTES = 2**16
Json = dict[str, Any]


class ServerError(Exception):
    """A call of a server did not succeed.

    Attributes:
        is_busy: Whether the server has too many requests.
        status: Status of the server's answer; None where it gave none that is an error.
    """

    is_busy = False
    status: int | None = None

    @property
    def refuses(self) -> bool:
        """Whether the request is at fault in the server's eyes, status 4xx."""
        return self.status is not None and self.status < 500


class UnavailableError(ServerError):
    """A server gave no answer that can be used. It or another may later."""


class ServerLostError(UnavailableError):
    """A response is not waited for any longer, since its server is lost."""


class BusyError(ServerError):
    """A server has too many requests."""

    is_busy = True


class RequestFailedError(ServerError):
    """A server answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class InvalidAnswerError(ServerError):
    """A server's sampled values are impossible: its weights or its keys and values may be damaged."""


class RefusedError(ValueError):
    """A server can't serve the policy."""


class ServerState(Enum):
    """Use of a server.

    `NEW → CHECKED → READY → LOST → READY`, and `LOST → NEW` where it has been started again.

    A server is NEW until its settings are known to fit, and CHECKED until it has the present weights. A READY server
    gets requests. One that fails is LOST: it gets none until it answers with the label of the present weights. Then it
    is READY at once. With another label it is NEW, is checked and gets the weights.

    A worked example, of a server that is killed and started again::

        connection refused by a request    READY → LOST     its other requests are sent elsewhere as they fail
        connection refused by a check      LOST             asked again after growing pauses
        label "default" found by a check   LOST → NEW       another process, with the weights of its folder
        its settings are checked           NEW → CHECKED
        the weights are loaded             CHECKED → READY
        a failure of a request from before READY            ignored: the server has been lost and found since
    """

    NEW = "new"
    CHECKED = "checked"
    READY = "ready"
    LOST = "lost"


class Server:
    """A server, its state and its last failure. It is used in one event loop.

    Args:
        url: Address.
        session: HTTP session of the calls.
        timeout_s: Longest wait for a response, in seconds.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self.url, self._session = url, session
        self._answers_in = min(timeout_s, _ANSWERS_IN)
        self.state = ServerState.NEW
        self.reason = "it has not been asked yet"
        """Last failure, in words."""
        self.loss_count = 0
        """Number of times that it was lost. A request notes it, so that a late failure is told from a new one."""
        self.failures = 0
        """Failures since its last response, which lengthen the pauses before it is used again."""
        self.must_reload = False
        """Whether its weights, keys and values can't be trusted."""
        self.has_had_weights = False
        """Whether it has ever had weights of this run."""
        self.adapter: str | None = None
        """Name of the adapters that it was given last; None for none."""
        self.responses: set[asyncio.Task[Any]] = set()
        """Calls under way for responses."""
        self._lost = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether it gets requests."""
        return self.state is ServerState.READY

    def mark_lost(
        self, reason: str, *, loss_count: int | None = None, must_reload: bool = False
    ) -> bool:
        """Send it no requests until it is ready again; return whether it was ready.

        Args:
            reason: Failure, in words.
            loss_count: Value when what failed was sent; a server lost and found since then is left alone.
                None for what happens now.
            must_reload: Whether it needs the weights again.
        """
        if loss_count is not None and loss_count != self.loss_count - (not self.is_ready):
            return False
        self.reason = reason
        self.must_reload |= must_reload
        if not self.is_ready:
            return False
        self.state = ServerState.LOST
        self._lost.set()
        self.loss_count += 1
        self.failures += 1
        return True

    def become_ready(self) -> None:
        """Note that it has the present weights."""
        self.state = ServerState.READY
        self._lost.clear()
        self.has_had_weights, self.must_reload = True, False

    async def lost_within(self, seconds: float) -> bool:
        """Wait until it is lost; return False after some seconds."""
        # `wait_for` would lose a cancellation that comes with the event
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._lost.wait()
        return not self.is_ready

    async def call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        timeout_s: float | None = None,
        max_bytes: int = CONTROL_BYTES,
        is_json: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the JSON of an answer, None for an empty one.

        Args:
            method: HTTP method.
            path: Path and query.
            body: JSON that is sent.
            timeout_s: Longest wait, in seconds.
            max_bytes: Largest answer.
            is_json: Whether the answer is JSON; another is not returned.
            headers: More headers.

        Raises:
            UnavailableError: There is none, it is no JSON or too long.
            BusyError: Too many requests.
            RequestFailedError: An error of the server.
        """
        limits = aiohttp.ClientTimeout(
            total=timeout_s or self._answers_in, sock_connect=_CONNECTS_IN
        )
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=None if body is None else json.dumps(body),
                headers={"Content-Type": "application/json", **(headers or {})},
                timeout=limits,
            ) as response:
                is_error = response.status >= 400
                data, is_whole = await _read(response, _ERROR_BYTES if is_error else max_bytes)
        except TimeoutError as error:
            raise UnavailableError(f"no answer within {limits.total:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(_line(error)) from error
        if response.status == 429:
            raise BusyError("it has too many requests")
        if response.status in (408, 502, 503, 504):
            raise UnavailableError(f"status {response.status}")
        if is_error:
            text = data.decode(errors="replace")
            raise RequestFailedError(f"status {response.status}: {_message(text)}", response.status)
        if not is_whole:
            raise UnavailableError(f"an answer of more than {max_bytes} bytes")
        try:
            return json.loads(data) if data and is_json else None
        except (ValueError, RecursionError) as error:
            raise UnavailableError("an answer that is no JSON") from error

    async def respond(
        self, body: Json, *, timeout_s: float, max_bytes: int, session: str = ""
    ) -> Any:
        """Return the JSON of a response; see `call`.

        Args:
            body: Request.
            timeout_s: Longest wait, in seconds.
            max_bytes: Largest answer.
            session: Name of its session, by which a router sends all of its requests to one server.

        Raises:
            ServerLostError: `cancel_responses` was called.
            ServerError: As `call`.
        """
        call = asyncio.ensure_future(
            self.call(
                "POST",
                "/inference/v1/generate",
                body,
                timeout_s=timeout_s,
                max_bytes=max_bytes,
                headers={"X-Session-ID": session},
            )
        )
        self.responses.add(call)
        try:
            return await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ServerLostError(self.reason) from None
        finally:
            self.responses.discard(call)

    def cancel_responses(self) -> None:
        """Give up the responses under way; their requests are to be sent elsewhere."""
        for call in self.responses:
            call.cancel()


class Router(Server):
    """Router that sends requests for responses on to servers. It has no weights, and is never lost itself."""


async def pause(attempt: int, *key: int | str, timeout_s: float) -> None:
    """Wait before another attempt: twice as long as before, up to 8 s, half of it at random.

    Args:
        attempt: Number of attempts before, from 0 on.
        key: What is attempted; it decides the random part.
        timeout_s: Seconds after which attempts end. A pause takes at most a tenth of them.
    """
    longest = min(_FIRST_PAUSE * 2.0 ** min(attempt, 30), _LONGEST_PAUSE, timeout_s / 10)
    fraction = derive_seed("pause", *key, attempt) / 2**48
    await asyncio.sleep(longest * (0.5 + 0.5 * fraction))


async def _read(response: aiohttp.ClientResponse, limit: int) -> tuple[bytes, bool]:
    """Return the first `limit` bytes of an answer, and whether these are all."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > limit:
            return b"".join(parts)[:limit], False
    return b"".join(parts), True


def address(url: str) -> str:
    """Return a server's address from that of its API.

    >>> address("http://127.0.0.1:8000/v1/")
    'http://127.0.0.1:8000'
    """
    return re.sub(r"(/v1)?/*$", "", url)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _message(text: str) -> str:
    """Return the reason in the body of an error."""
    try:
        body = json.loads(text)
        text = body["error"]["message"] if "error" in body else str(body["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return " ".join(str(text).split())[:300]
