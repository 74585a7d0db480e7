"""An episode on OpenEnv servers: a session on one of them, replaced by another one where it is lost.

    message -> session (a new one: the episode up to now is played again and compared) -> answer
        lost, full, not there -> next server, after all of them with a growing pause -> …, until it takes too long

An answer that differs from the one before ends the episode, and the replays of all later ones on these servers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

from ..adapters.openenv_session import Session, SessionLost, fetched, step_of, worded

log = logging.getLogger(__name__)
# The server's words for a session that it does not have.
_LOSSES = frozenset({"CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR"})
_KEY = "RAGEN_PL_ENVIRONMENT_KEY"
# sessions that may be lost over one request
_MAX_LOSSES = 3
# seconds before a second look at all servers, doubled with each one up to the longest
_PAUSE_S, _LONGEST_S = 0.1, 2.0
# environments of this process, which begin at different servers, and servers that do not repeat episodes
_made = count(random.SystemRandom().randrange(1000))
_differing: set[str] = set()


class ServedEpisode:
    """The present episode of an environment on servers.

    Args:
        urls: Addresses of the servers.
        name: What the episodes of equal servers have in common.
        timeout_s: Longest wait for an answer.
        connect_timeout_s: Longest wait for a connection.
        search_s: Seconds in which a server is looked for.
        idle_limit_s: Seconds without a request after which a server gives a session up; None where it never does.
        replay: Whether an episode goes on where its session is lost.

    Attributes:
        replayed_steps: Number of steps that were played again in new sessions.

    Raises:
        ValueError: There is no address, or one is none.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        name: str,
        timeout_s: float,
        connect_timeout_s: float,
        search_s: float,
        idle_limit_s: float | None,
        replay: bool,
    ) -> None:
        self.urls = _addresses(urls)
        self.timeout_s, self.connect_timeout_s = timeout_s, connect_timeout_s
        self.search_s, self.idle_limit_s = search_s, idle_limit_s
        self._replay, self._name = replay, f"{self.urls} {name}"
        self.replayed_steps = 0
        self._next = next(_made)
        self._session: Session | None = None
        # messages since the reset, each with a digest of its answer
        self._messages: list[tuple[Mapping[str, Any], bytes]] = []
        self._is_numbered = self._has_failed = self._has_answered = False

    @property
    def url(self) -> str:
        """Address of the present server."""
        return self.urls[self._next % len(self.urls)]

    @property
    def replays(self) -> bool:
        """Whether an episode goes on where its session is lost."""
        return self._replay and self._name not in _differing

    def about(self) -> dict[str, Any]:
        """Return the metadata that a server gives at `/metadata`.

        Raises:
            ConnectionError: None answers.
        """
        until = time.monotonic() + self.search_s
        for looks in count():
            address = "http" + self.url.removeprefix("ws").removesuffix("/ws")
            try:
                return fetched(f"{address}/metadata", timeout_s=self.connect_timeout_s, key=_key())
            except ConnectionError as error:
                self._look_on(looks, until, error)
        raise AssertionError

    def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return its answer; a reset begins a new episode.

        Raises:
            ConnectionError: No server goes on with the episode.
            RuntimeError: The server wants another key.
        """
        content, number = dict(data), None
        message = {"type": kind, "data": content}
        if kind == "reset":
            self._messages, self._has_failed = [], False
        elif self._is_numbered:
            number = len(self._messages)
            given = content.get("metadata")
            content["metadata"] = (given if isinstance(given, dict) else {}) | {"step": number}
        with self._failing():
            answer = self._exchange(message, number)
        if kind == "reset":
            self._is_numbered = step_of(answer) == 0
        self._messages.append((message, _digest(answer)))
        return answer

    def close(self) -> None:
        """End the session."""
        session, self._session, self._has_answered = self._session, None, False
        if session is not None:
            with suppress(ConnectionError):
                session.close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (ConnectionError, RuntimeError):
            self._has_failed = True
            self.close()
            raise

    def _exchange(self, message: Mapping[str, Any], number: int | None) -> dict[str, Any]:
        """Return the answer to a message of the present episode, in a new session where the old one is lost."""
        is_reset = message["type"] == "reset"
        if self._has_failed:
            raise ConnectionResetError(f"{self.url}: the server has ended the session")
        until, losses = time.monotonic() + self.search_s, 0
        for looks in count():
            try:
                session = self._session or self._connected()
                return self._asked(session, message, number)
            except SessionLost as loss:
                had_one = self._has_answered
                self.close()
                losses += had_one
                if not is_reset and not self.replays:
                    raise
                if losses > _MAX_LOSSES:
                    raise
                log.debug("a session is lost: %s", loss)
                if had_one and losses == 1:
                    # the first one may have been lost in a pause: no reason to wait
                    continue
                self._look_on(looks, until, loss)
        raise AssertionError

    def _asked(
        self, session: Session, message: Mapping[str, Any], number: int | None
    ) -> dict[str, Any]:
        answer = session.ask(message, number=number)
        if _code(answer) in _LOSSES:
            raise SessionLost(f"{session.url}: {worded(answer)}")
        self._has_answered = True
        return answer

    def _look_on(self, looks: int, until: float, error: ConnectionError) -> None:
        """Turn to the next server, after all of them with a pause; once it has taken too long, raise the error."""
        if time.monotonic() > until:
            raise error
        self._next += 1
        rounds = (looks + 1) // len(self.urls)
        if (looks + 1) % len(self.urls) == 0:
            longest = min(_LONGEST_S, _PAUSE_S * 2 ** min(rounds, 10))
            time.sleep(random.SystemRandom().uniform(0.5, 1.0) * longest)

    def _connected(self) -> Session:
        """Return a new session in which the episode has been played up to now.

        Raises:
            SessionLost: There is none.
            ConnectionError: The episode goes differently there.
        """
        url = self.url
        self._has_answered = False
        session = Session(
            url,
            timeout_s=self.timeout_s,
            connect_timeout_s=self.connect_timeout_s,
            idle_limit_s=self.idle_limit_s,
            key=_key(),
        )
        self._session = session
        for number, (message, seen) in enumerate(self._messages):
            answer = self._asked(session, message, number if self._is_numbered else None)
            if _digest(answer) != seen:
                if self._name not in _differing:
                    _differing.add(self._name)
                    log.warning(
                        "%s: the same seed and actions have other answers in another session; episodes whose session "
                        "is lost are not replayed any more",
                        url,
                    )
                raise ConnectionError(
                    f"{url}: a new session answered differently after {number} of the same actions, so the episode "
                    "cannot go on"
                )
            self.replayed_steps += message["type"] == "step"
        return session


def _addresses(urls: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of WebSockets.

    Raises:
        ValueError: There is none, or one is no address.
    """
    given = (urls,) if isinstance(urls, str) else tuple(urls)
    addresses = []
    for url in given:
        scheme, found, place = url.rstrip("/").partition("://")
        if not found or scheme not in ("http", "https", "ws", "wss"):
            raise ValueError(
                f"urls: found {url!r}, expected an address such as http://127.0.0.1:8000"
            )
        addresses.append(f"{scheme.replace('http', 'ws')}://{place}/ws")
    if not addresses:
        raise ValueError("urls: found none, expected addresses such as [http://127.0.0.1:8000]")
    return tuple(addresses)


def _key() -> str | None:
    return os.environ.get(_KEY) or None


def _code(answer: Mapping[str, Any]) -> str | None:
    """Return the code of an error, None for another answer."""
    return (answer.get("data") or {}).get("code") if answer.get("type") == "error" else None


def _digest(answer: Mapping[str, Any]) -> bytes:
    """Return a digest of an answer's episode, without metadata, which may hold times and names of sessions."""
    data = answer.get("data") or {}
    content = [
        answer.get("type"),
        *(data.get(name) for name in ("observation", "reward", "done", "code")),
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
