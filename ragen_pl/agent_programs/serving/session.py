"""Sessions of the endpoint: requests that wait for the policy, and answers that were delivered.

A session is used by two threads. The server's thread registers requests and delivers answers; the owner's thread takes
events and gives answers.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ragen_pl.agent_programs.serving.chat_request import ClientRequest
from ragen_pl.agent_programs.serving.chat_response import Answer
from ragen_pl.agent_programs.serving.errors import RequestError
from ragen_pl.agent_programs.serving.images import ImageReader
from ragen_pl.agent_programs.serving.rewards import ResponseRewards
from ragen_pl.trajectory import ChatRequest

# bodies that are known again when an SDK sends them again
_MAX_KNOWN = 256
# until the server's thread has done something
_SERVER_S = 60.0
NO_REQUEST = ChatRequest(messages=[])
"""In place of the messages of a request that the policy does not answer, or has answered."""


class EventKind(StrEnum):
    """Kind of an event of a session."""

    REQUEST = "request"
    """A request waits for its answer."""
    DELIVERED = "delivered"
    """A client has got an answer."""
    GONE = "gone"
    """No client is left to get an answer."""
    REFUSED = "refused"
    """As many requests in a row as `SessionLimits.refused_requests` were refused."""
    EXIT = "exit"
    """The program has ended."""


@dataclass(frozen=True, slots=True)
class Event:
    """Event of a session.

    Attributes:
        kind: What happened.
        call: The request; None for `REFUSED` and `EXIT`.
        outcome: How the program ended; for `REFUSED` the `reason`.
    """

    kind: EventKind
    call: Call | None = None
    outcome: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassedOn:
    """Answer of another model's endpoint.

    Attributes:
        status: HTTP status.
        content_type: Type of the body.
        body: The body.
    """

    status: int
    content_type: str
    body: bytes


@dataclass(eq=False, slots=True)
class Call:
    """A request under way: WAITING → ANSWERED → DELIVERED, or WAITING → REFUSED.

    A client that sends the same body again with a retry count waits for the same answer, and so does one that sends it
    once no connection waits any more. ANSWERED stays so while no client is there to get the answer, until one comes
    back or the owner forgets the call.

    Attributes:
        id: Id of the response.
        digest: Of the body.
        session: Its session.
        answer: The answer or the error, once there is one.
        client: The request, once it was read; without messages and images once it was answered.
        clients: Number of open connections that wait.
        delivered: Whether one of them got the answer.
        retries: Largest retry count with which a client has asked for it again.

    Example:
        A client that gives up and comes back::

            POST, body A                  WAITING, clients 1
            (the client closes)           WAITING, clients 0
            owner answers                 ANSWERED, and GONE is told
            POST, body A, retry count 1   clients 1
            its connection is written     DELIVERED
    """

    id: str
    digest: str
    session: Session
    answer: asyncio.Future[Answer | PassedOn]
    client: ClientRequest | None = None
    clients: int = 0
    delivered: bool = False
    retries: int = 0

    @property
    def is_left(self) -> bool:
        """Whether no client is there to get its answer, and none has got it."""
        return self.clients == 0 and not self.delivered


@dataclass(slots=True)
class SessionLimits:
    """Limits of a session.

    Attributes:
        open_requests: Requests that wait at once.
        busy_status: HTTP status of further ones. SDKs send a request again after 429, and not after 400.
        train: Whether the policy is trained on its responses.
        unconstrained: Whether response formats are accepted and not enforced.
        sampling: Whether the owner honours the sampling parameters of requests.
        refused_requests: Requests that may be refused in a row, without an answer between them; None for any number.
    """

    open_requests: int = 64
    busy_status: int = 400
    train: bool = True
    unconstrained: bool = False
    sampling: bool = False
    refused_requests: int | None = None


@dataclass(eq=False, slots=True)
class Session:
    """Requests of one program.

    Attributes:
        loop: Event loop of the server.
        limits: Limits.
        model: Name of the policy's model.
        upstream: Other models, with the endpoints that answer for them.
        key: Key that the program sends.
        reward_key: Key with which rewards can be set over HTTP; None where they cannot.
        events: What happened, for the owner.
        images: Images of its requests.
        rewards: Rewards set over HTTP.
        counts: Refused requests by code, retries, and requests to other models.
        ended: Whether it takes no more requests.
    """

    loop: asyncio.AbstractEventLoop
    limits: SessionLimits = field(default_factory=SessionLimits)
    model: str = "policy"
    upstream: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    reward_key: str | None = None
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    images: ImageReader = field(default_factory=ImageReader)
    rewards: ResponseRewards = field(default_factory=ResponseRewards)
    counts: dict[str, int] = field(default_factory=dict)
    ended: bool = False
    # the newest ones, which clients may ask for again
    _known: deque[Call] = field(default_factory=lambda: deque(maxlen=_MAX_KNOWN))
    _waiting: set[Call] = field(default_factory=set)
    _number: int = 0
    _refused: int = 0

    # ---- in the owner's thread

    def answer(self, call: Call, answer: Answer | RequestError) -> None:
        """Answer a request. `DELIVERED` or `GONE` follows for an answer that is no error."""
        self.loop.call_soon_threadsafe(self._answer, call, answer)

    def withdraw_answer(self, call: Call) -> bool:
        """Give up on an answer that no client got: a request with the same body is a new one.

        Returns:
            Whether it was given up. Otherwise a client came for it meanwhile, and `DELIVERED` or `GONE` follows.
        """
        given_up: Future[bool] = Future()
        self.loop.call_soon_threadsafe(lambda: given_up.set_result(self._give_up(call)))
        return given_up.result(timeout=_SERVER_S)

    def close(self) -> None:
        """Take no more requests, and refuse those that wait."""
        self.loop.call_soon_threadsafe(self._close)

    # ---- in the server's thread

    def count(self, name: str) -> None:
        """Add one to a count."""
        self.counts[name] = self.counts.get(name, 0) + 1

    def note_refused(self, error: RequestError) -> None:
        """Count a refused request. `REFUSED` follows once there are too many in a row."""
        self.count(f"refused_{error.code}")
        error.is_noted = True
        self._refused += 1
        if self._refused == self.limits.refused_requests:
            reason = (
                f"its last {self._refused} requests were refused, none was answered between them; the last one with "
                f"{error.code}: {error}"
            )
            self.events.put(Event(EventKind.REFUSED, outcome={"reason": reason}))

    def find_retry(self, digest: str, *, retries: int) -> Call | None:
        """Return the call that a body asks for again, None for a new one.

        It is one that nobody waits for and that was not delivered, or any if the client says that it tries again. Of
        several with the same body, each client gets its own back: those that wait come in their order, then those that
        were delivered, the newest first, and last the ones that were asked for again as often.
        """
        same = [
            call for call in self._known if call.digest == digest and not call.answer.cancelled()
        ]
        if retries == 0:
            same = [call for call in same if call.is_left]
        if not same:
            return None
        waiting = [call for call in same if not call.delivered]
        delivered = [call for call in reversed(same) if call.delivered]
        call = min(
            [*waiting, *delivered],
            key=lambda each: (each.retries >= max(1, retries), not each.is_left),
        )
        call.retries = max(call.retries, retries)
        self.count("retries")
        return call

    def register(self, digest: str, *, id_prefix: str) -> Call:
        """Return a new call.

        Args:
            digest: Of its body.
            id_prefix: Beginning of its id.

        Raises:
            RequestError: Too many wait.
        """
        if len(self._waiting) >= self.limits.open_requests:
            raise RequestError(
                self.limits.busy_status,
                f"{len(self._waiting)} requests of the session wait, at most {self.limits.open_requests} may",
                code="too_many_requests",
                retry=self.limits.busy_status == 429,
            )
        call = Call(f"{id_prefix}{self._number:06}", digest, self, self.loop.create_future())
        self._number += 1
        self._known.append(call)
        self._waiting.add(call)
        return call

    def accept(self, call: Call, client: ClientRequest) -> None:
        """Hand a request to the owner."""
        call.client = client
        self.events.put(Event(EventKind.REQUEST, call))

    def forward(self, call: Call, passed: PassedOn) -> None:
        """End a call with the answer of another model, of which the owner is not told."""
        self._waiting.discard(call)
        if not call.answer.done():
            call.answer.set_result(passed)

    def refuse(self, call: Call, error: RequestError) -> None:
        """End a call with an error."""
        self._answer(call, error)

    def disconnect(self, call: Call, *, delivered: bool) -> None:
        """Note that a connection is done with a call."""
        call.clients -= 1
        if delivered and not call.delivered:
            call.delivered = True
            if _has_answer(call):
                self.events.put(Event(EventKind.DELIVERED, call))
        elif not call.delivered and call.clients == 0 and _has_answer(call):
            self.events.put(Event(EventKind.GONE, call))

    def _answer(self, call: Call, answer: Answer | RequestError) -> None:
        self._waiting.discard(call)
        if call.answer.done():
            return
        if isinstance(answer, RequestError):
            self.note_refused(answer)
            call.answer.set_exception(answer)
            # nobody may be waiting
            call.answer.exception()
            self._forget(call)
        else:
            self._refused = 0
            call.answer.set_result(answer)
            if call.client is not None:
                # calls are kept for retries, which need no images
                call.client = replace(call.client, chat=NO_REQUEST, images=[])
            if call.clients == 0:
                self.events.put(Event(EventKind.GONE, call))

    def _give_up(self, call: Call) -> bool:
        if call.delivered or call.clients:
            return False
        self._forget(call)
        return True

    def _forget(self, call: Call) -> None:
        with suppress(ValueError):
            self._known.remove(call)

    def _close(self) -> None:
        self.ended = True
        for call in [*self._waiting]:
            self._answer(call, ended_error())


def _has_answer(call: Call) -> bool:
    """Return whether the policy has answered a call."""
    answer = call.answer
    return answer.done() and answer.exception() is None and isinstance(answer.result(), Answer)


def ended_error() -> RequestError:
    """Return the error of a request to a session that has ended. SDKs do not send it again."""
    return RequestError(410, "the session has ended", code="session_ended")
