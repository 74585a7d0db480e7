"""Requests to an OpenAI-compatible chat API: the address, the key, attempts and their limits.

    attempt ──► answer
       │
       ├─ Effect.AGAIN ──► pause ──► attempt … until there were `max_retries` more
       ├─ Effect.REQUEST ──► this request fails
       └─ Effect.ALL ──► every request would fail

A server is not trusted: what it answers is bounded in time and size, and the key is taken out of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp

from ragen_pl.base.seeding import derive_seed
from ragen_pl.rollout.chat_answers import Answer, Usage, read_answer, read_tokens

OPENAI = "https://api.openai.com/v1"
_MIB = 1024 * 1024
_MAX_MIB = 32
"""Largest answer, many times the text of the longest response that any model gives."""
_CONNECT_S = 10.0
# of the first pause, of any pause, and of one that the server asks for
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_ASKED_S = 0.5, 30.0, 120.0
_SHOWN = 300
# a shorter one, such as the EMPTY of local servers, may be a word of a text
_SHORTEST_SECRET = 8
_BUSY = (408, 409, 425, 429)
# errors that no later attempt changes, whatever the status
_NO_QUOTA = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
_NO_KEY = "none"


class Effect(Enum):
    """Consequence of a failed attempt."""

    AGAIN = "another attempt may succeed"
    REQUEST = "this request fails"
    ALL = "every request would fail"


class RequestError(Exception):
    """A request without a usable answer.

    Args:
        reason: Why, in one line, without the key.
        effect: What follows.
        pause_s: Pause that the server asks for, in seconds.
    """

    def __init__(self, reason: str, effect: Effect, *, pause_s: float | None = None) -> None:
        super().__init__(reason)
        self.effect, self.pause_s = effect, pause_s


class ChatClient:
    """Sends requests to a chat API.

    Args:
        base_url: Address of the API; None for the environment variable OPENAI_BASE_URL, or OpenAI's own.
        key_variable: Environment variable that holds the key.
        timeout_s: Longest time of an attempt, from the connection to the last byte, in seconds.
        max_retries: Attempts after the first.
        usage: Counts the tokens of all answers.

    Raises:
        ValueError: The address is none, or holds a password; or there is no key.
    """

    def __init__(
        self,
        *,
        base_url: str | None,
        key_variable: str,
        timeout_s: float,
        max_retries: int,
        usage: Usage,
    ) -> None:
        key = key_of(key_variable, base_url=base_url)
        self._key_variable = key_variable
        self.address = checked_address(base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI)
        self.max_retries, self.usage = max_retries, usage
        self._timeout = aiohttp.ClientTimeout(
            total=timeout_s, sock_connect=min(timeout_s, _CONNECT_S)
        )
        forms = (key, quote(key, safe=""), json.dumps(key)[1:-1])
        self._secrets = forms if len(key) >= _SHORTEST_SECRET else ()
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, request: Mapping[str, Any], *, number: str) -> Answer:
        """Return the answer to a request.

        Args:
            request: The body, as JSON types.
            number: Identifies the request; the lengths of its pauses depend on it.

        Raises:
            RequestError: There is none.
        """
        attempt = 0
        while True:
            try:
                return await self._attempt(request)
            except RequestError as error:
                if error.effect is not Effect.AGAIN or attempt >= self.max_retries:
                    raise
                pause_s = error.pause_s
            await asyncio.sleep(_pause(attempt, number) if pause_s is None else pause_s)
            attempt += 1

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def without_secrets(self, text: str) -> str:
        """Return a text without the key."""
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return text

    def line(self, text: str) -> str:
        """Return the beginning of a text in one line, without the key."""
        return self.without_secrets(" ".join(text.split()))[:_SHOWN]

    async def _attempt(self, request: Mapping[str, Any]) -> Answer:
        try:
            status, headers, text = await self._post(json.dumps(request))
        except TimeoutError:
            reason = f"no answer within {self._timeout.total:g} s"
            raise RequestError(reason, Effect.AGAIN) from None
        except (aiohttp.ClientError, OSError) as error:
            reason = f"cannot be reached: {self.line(str(error)) or type(error).__name__}"
            raise RequestError(reason, Effect.AGAIN) from None
        body = None
        with suppress(ValueError, RecursionError):
            body = json.loads(text)
        if status >= 300 or (isinstance(body, dict) and body.get("error")):
            raise self._error(status, body, text, headers)
        try:
            answer = read_answer(text if body is None else body)
        except ValueError as error:
            # it is paid for all the same
            self.usage.sent(read_tokens(body))
            raise RequestError(self.line(str(error)), Effect.AGAIN) from None
        self.usage.sent(answer.tokens)
        return answer

    async def _post(self, data: str) -> tuple[int, Mapping[str, str], str]:
        """Return status, headers and body of the answer to a request.

        Raises:
            RequestError: It is too long.
        """
        if self._session is None:
            # made in the thread of the requests
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, timeout=self._timeout, trust_env=True
            )
        address = f"{self.address}/chat/completions"
        # a redirection would take the key elsewhere
        async with self._session.post(address, data=data, allow_redirects=False) as response:
            body = bytearray()
            async for part in response.content.iter_chunked(1 << 16):
                body += part
                if len(body) > _MAX_MIB * _MIB:
                    raise RequestError(f"an answer of more than {_MAX_MIB} MiB", Effect.AGAIN)
        text = body.decode("utf-8", "replace")
        return response.status, response.headers, self.without_secrets(text)

    def _error(
        self, status: int, body: object, text: str, headers: Mapping[str, str]
    ) -> RequestError:
        """Return the error that a server answers with."""
        match body:
            case {"error": dict(details)}:
                pass
            case {"error": error} if error:
                details = {"message": error}
            case _:
                details = {"message": text}
        codes = [str(details.get(name)) for name in ("code", "type")]
        reason = self.line(f"status {status}: {details.get('message') or text}")
        if status == 401:
            return RequestError(
                f"the key in {self._key_variable} was refused ({reason})", Effect.ALL
            )
        if status == 402 or set(_NO_QUOTA) & set(codes):
            return RequestError(f"there is no credit left ({reason})", Effect.ALL)
        if status == 404 or 300 <= status < 400:
            hint = "set endpoint.model or endpoint.base_url"
            return RequestError(f"there is no such model or address ({reason}); {hint}", Effect.ALL)
        if status < 300 or status in _BUSY or status >= 500:
            return RequestError(reason, Effect.AGAIN, pause_s=_asked_pause(headers))
        hint = "endpoint.parameters changes its fields"
        return RequestError(f"it refuses a request ({reason}); {hint}", Effect.REQUEST)


def _pause(attempt: int, number: str) -> float:
    """Return the length of a pause in seconds: twice as long after each attempt, shortened by up to a half."""
    longest = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
    return longest * (1 - derive_seed("pause", number, attempt) % 1000 / 2000)


def _asked_pause(headers: Mapping[str, str]) -> float | None:
    """Return the pause in seconds that a server asks for, None without one."""
    text = headers.get("Retry-After", "")
    return min(float(text), _LONGEST_ASKED_S) if re.fullmatch(r"\d{1,9}(\.\d+)?", text) else None


def checked_address(base_url: str) -> str:
    """Return an address without a slash at its end.

    Raises:
        ValueError: It is none, or holds a user's name or password.
    """
    try:
        parts = urlsplit(base_url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        parts, sound = urlsplit(""), False
    # not shown: it may hold a password
    if "@" in base_url:
        raise ValueError(
            "endpoint.base_url: holds a user's name or a password, which logs would show; leave it out, and put the "
            "key into the environment variable that endpoint.api_key_variable names"
        )
    if not sound or parts.query or parts.fragment:
        raise ValueError(
            f"endpoint.base_url={base_url}: expected an address such as http://localhost:8000/v1"
        )
    return base_url.rstrip("/")


def key_of(variable: str, *, base_url: str | None) -> str:
    """Return the key of an API.

    Raises:
        ValueError: The variable is not set and OpenAI's own API is asked, or it holds no key.
    """
    # not shown: it may be the key itself
    if not re.fullmatch(r"[A-Za-z_]\w*", variable, re.ASCII):
        raise ValueError(
            "endpoint.api_key_variable: expected the name of an environment variable that holds the key, such as "
            "OPENAI_API_KEY; the key itself is never a setting"
        )
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]*", key):
        raise ValueError(
            f"endpoint.api_key_variable={variable}: this environment variable holds blanks, control characters or "
            "characters beyond ASCII inside; set it to your key alone"
        )
    if key:
        return key
    if base_url is None:
        raise ValueError(
            f"endpoint.api_key_variable={variable}: this environment variable is not set; set it to your key, or set "
            "endpoint.base_url to an API that needs none"
        )
    return _NO_KEY
