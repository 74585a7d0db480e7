"""HTTP server of the endpoint, in a thread of its own: Chat Completions, models, and rewards by response."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from ragen_pl.serving.chat_request import ClientRequest, read_json, read_request
from ragen_pl.serving.chat_response import END_OF_STREAM, Answer, chunks, completion, event
from ragen_pl.serving.errors import RequestError
from ragen_pl.serving.images import ImageReader
from ragen_pl.serving.session import Call, Event, EventKind, Session, ended_error
from ragen_pl.serving.upstream import passed_on
from ragen_pl.trajectory import ChatRequest

log = logging.getLogger(__name__)
MAX_BODY = 32 * 1024 * 1024
LOOPBACK = "127.0.0.1"
_BODY_S = 60.0
# a comment in a stream keeps the connection
_COMMENT_S = 15.0
_MAX_PAST = 10_000
# of a request that another model answers
_NO_REQUEST = ChatRequest(messages=[])


@dataclass(frozen=True, slots=True)
class Protocol:
    """An API of the endpoint.

    Attributes:
        read: reads a request; takes its JSON, an image reader, `unconstrained` and `train`.
        whole: writes an answer as one JSON object.
        stream: yields an answer as server-sent events.
    """

    read: Callable[..., ClientRequest]
    whole: Callable[[Answer], dict[str, Any]]
    stream: Callable[[Answer, ClientRequest], Iterator[bytes]]


def _chat_stream(answer: Answer, client: ClientRequest) -> Iterator[bytes]:
    for chunk in chunks(answer, include_usage=client.include_usage):
        yield event(chunk)
    yield END_OF_STREAM


CHAT = Protocol(read=read_request, whole=completion, stream=_chat_stream)


class AgentServer:
    """Endpoint of the policy for programs, on one address.

    Args:
        host: address to listen on.
        port: port; 0 for a free one.
        protocols: APIs by path.

    Attributes:
        url: base URL for SDKs, `http://HOST:PORT/v1`.
        loop: its event loop.
    """

    def __init__(
        self,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        protocols: Mapping[str, Protocol] | None = None,
    ) -> None:
        if host != LOOPBACK:
            log.warning(
                "the endpoint listens on %s: whoever reaches it and has a key can use the policy",
                host,
            )
        self._protocols = {"/chat/completions": CHAT} if protocols is None else protocols
        # by the hash of a key, so that no comparison tells how much of a key is right
        self._sessions: dict[str, Session] = {}
        # hashes of the keys of sessions that have ended, newest last
        self._past: dict[str, None] = {}
        self._noted: set[str] = set()
        self.loop = asyncio.new_event_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{listening.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._run, args=(listening,), daemon=True)
        self._thread.start()
        self._close = weakref.finalize(self, _stop, self.loop, self._thread)

    def open(self, session: Session) -> None:
        """Take requests of a session."""
        self._sessions[_hashed(session.key)] = session
        if session.reward_key is not None:
            self._sessions[_hashed(session.reward_key)] = session

    def end(self, session: Session) -> None:
        """End a session: later requests get status 410."""
        session.close()
        for key in filter(None, (session.key, session.reward_key)):
            self._sessions.pop(_hashed(key), None)
            self._past[_hashed(key)] = None
        while len(self._past) > _MAX_PAST:
            del self._past[next(iter(self._past))]

    def watch(self, connection: socket.socket, session: Session) -> None:
        """Put an `EXIT` event into a session once a connection has brought an outcome and is closed."""
        self.loop.call_soon_threadsafe(_watch, self.loop, connection, session)

    def close(self) -> None:
        """Stop the server."""
        self._close()

    def _run(self, listening: socket.socket) -> None:
        asyncio.set_event_loop(self.loop)
        app = web.Application(client_max_size=MAX_BODY)
        for prefix in ("/v1", "/s/{key}/v1"):
            for path, protocol in self._protocols.items():
                app.router.add_post(prefix + path, self._handler(protocol))
            app.router.add_get(f"{prefix}/models", self._answering(self._models))
            app.router.add_post(f"{prefix}/rewards", self._answering(self._reward))
        app.router.add_route("*", "/{path:.*}", self._answering(self._unknown))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self.loop.run_until_complete(runner.setup())
        self.loop.run_until_complete(web.SockSite(runner, listening, backlog=1024).start())
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(runner.cleanup())
            self.loop.close()

    def _handler(
        self, protocol: Protocol
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._respond(request, protocol)

        return self._answering(handle)

    @staticmethod
    def _answering(
        handle: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that answers errors as OpenAI's API does."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await handle(request)
            except RequestError as error:
                return web.json_response(error.body, status=error.status, headers=error.headers)

        return answer

    def _session(self, request: web.Request) -> Session:
        """Return the session of a request.

        Raises:
            RequestError: its key is unknown, or the session has ended.
        """
        header = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = str(request.match_info.get("key") or header)
        session = self._sessions.get(_hashed(key))
        if session is None and _hashed(key) in self._past:
            raise ended_error()
        if session is None or key == session.reward_key:
            raise RequestError(
                401, "unknown key: send the session's key as a bearer token", code="invalid_api_key"
            )
        if session.ended:
            raise ended_error()
        return session

    async def _respond(self, request: web.Request, protocol: Protocol) -> web.StreamResponse:
        session = self._session(request)
        data = await _body(request)
        digest = hashlib.sha256(request.path.encode() + data).hexdigest()
        call = session.known(digest, retries=_retries(request))
        if call is None:
            call = session.register(digest)
            call.clients += 1
            try:
                body, client = await asyncio.to_thread(
                    _read, protocol, data, session, trains=request.headers.get("x-train") != "false"
                )
                if client.model not in ("", session.model):
                    passed = await passed_on(session, client.model, body, request.path)
                    session.refuse(call, ended_error())
                    call.clients -= 1
                    return passed
                self._note(client)
                if session.ended:
                    raise ended_error()
                session.accept(call, client)
            except BaseException as error:
                known = error if isinstance(error, RequestError) else ended_error()
                session.refuse(call, known)
                call.clients -= 1
                raise
        else:
            call.clients += 1
        delivered = False
        try:
            response = await self._write(request, protocol, call)
            delivered = True
            return response
        finally:
            session.leave(call, delivered=delivered)

    async def _write(
        self, request: web.Request, protocol: Protocol, call: Call
    ) -> web.StreamResponse:
        """Wait for a call's answer and write it.

        Raises:
            RequestError: the call was refused.
            ConnectionError: the client is gone.
        """
        # a retry that came before the body of the first request was read waits for that too
        stream = call.client is not None and call.client.stream
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        while True:
            try:
                wait_s = _COMMENT_S if stream else None
                answer = await asyncio.wait_for(asyncio.shield(call.answer), wait_s)
                break
            except TimeoutError:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(b": waiting\n\n")
            except RequestError as error:
                if not response.prepared:
                    raise
                await response.write(event(error.body))
                await response.write_eof()
                return response
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError("the client is gone")
        client = call.client
        assert client is not None
        if not client.stream:
            whole = web.json_response(protocol.whole(answer))
            await whole.prepare(request)
            await whole.write_eof()
            return whole
        if not response.prepared:
            await response.prepare(request)
        for part in protocol.stream(answer, client):
            await response.write(part)
        await response.write_eof()
        return response

    def _note(self, client: ClientRequest) -> None:
        """Log once what is not honoured."""
        for name, value in (client.ignored | client.sampling).items():
            if name not in self._noted:
                self._noted.add(name)
                log.info(
                    "a program sends %s=%s, which is ignored: the run's config decides", name, value
                )

    async def _models(self, request: web.Request) -> web.Response:
        session = self._session(request)
        names = [session.model, *session.upstream]
        models = [{"id": name, "object": "model", "owned_by": "ragen_pl"} for name in names]
        return web.json_response({"object": "list", "data": models})

    async def _reward(self, request: web.Request) -> web.Response:
        header = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        session = self._sessions.get(_hashed(header))
        if session is None or header != session.reward_key:
            raise RequestError(
                401, "unknown key: rewards have a key of their own", code="invalid_api_key"
            )
        if session.ended:
            raise ended_error()
        body = read_json(await _body(request))
        if not isinstance(body.get("id"), str) or "reward" not in body:
            raise RequestError(400, 'expected {"id": id of a response, "reward": number}')
        session.rewards.append((body["id"], body["reward"]))
        return web.json_response({"id": body["id"]})

    async def _unknown(self, request: web.Request) -> web.Response:
        paths = ", ".join(f"POST /v1{path}" for path in self._protocols)
        raise RequestError(
            404,
            f"{request.method} {request.path}: known are {paths} and GET /v1/models",
            code="unknown_url",
        )


def _read(
    protocol: Protocol, data: bytes, session: Session, *, trains: bool
) -> tuple[dict[str, Any], ClientRequest]:
    body = read_json(data)
    model = body.get("model")
    limits = session.limits
    # another model's endpoint reads its requests itself
    images = session.images if model in (None, "", session.model) else ImageReader()
    if model in session.upstream:
        return body, ClientRequest(chat=_NO_REQUEST, model=str(model))
    client = protocol.read(
        body, images, unconstrained=limits.unconstrained, train=limits.train and trains
    )
    return body, client


async def _body(request: web.Request) -> bytes:
    try:
        return await asyncio.wait_for(request.read(), _BODY_S)
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestError(
            413, f"the body has more than {MAX_BODY} bytes", code="body_too_large"
        ) from error
    except TimeoutError as error:
        raise RequestError(400, f"the body took longer than {_BODY_S:g} s") from error


def _retries(request: web.Request) -> int:
    """Return how often an SDK has sent a request before."""
    count = request.headers.get("x-stainless-retry-count", "0")
    return int(count) if count.isdecimal() and len(count) < 9 else 0


def _hashed(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def _watch(loop: asyncio.AbstractEventLoop, connection: socket.socket, session: Session) -> None:
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


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:
        thread.join(timeout=5.0)
