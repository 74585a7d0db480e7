"""HTTP server of the endpoint, in a thread of its own: Chat Completions, models, and rewards by response."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

from aiohttp import web
from typing_extensions import TypedDict

from ragen_pl.agent_programs.serving.address import LOOPBACK, listening_socket
from ragen_pl.agent_programs.serving.chat_request import ClientRequest, read_json, read_truth
from ragen_pl.agent_programs.serving.errors import RequestError, read_as
from ragen_pl.agent_programs.serving.protocol import CHAT, Protocol
from ragen_pl.agent_programs.serving.reading import (
    MAX_BODY,
    is_small,
    read_body,
    retries_of,
    watch_exit,
)
from ragen_pl.agent_programs.serving.responses_api import RESPONSES
from ragen_pl.agent_programs.serving.session import NO_REQUEST, Call, PassedOn, Session, ended_error
from ragen_pl.agent_programs.serving.upstream import passed_on
from ragen_pl.base.access import bearer_key, is_loopback, key_digest, refusal
from ragen_pl.base.typed_json import shown

log = logging.getLogger(__name__)
PROTOCOLS: Mapping[str, Protocol] = {"/chat/completions": CHAT, "/responses": RESPONSES}
"""APIs of the endpoint by path."""
_Read: TypeAlias = tuple[dict[str, Any], ClientRequest]
_BACKLOG = 1024
_MAX_PAST = 10_000


class _Reward(TypedDict):
    id: str
    reward: Any


class AgentServer:
    """Endpoint of the policy for programs, on one address.

    Args:
        host: Address to listen on.
        listening: Socket that is bound to it; None for one on a free port.
        body_s: Longest time in seconds until a request's body is there.
        comment_s: Time in seconds after which a comment keeps the connection of a stream that waits.

    Attributes:
        url: Base URL for SDKs, `http://HOST:PORT/v1`.
        loop: Its event loop.
    """

    def __init__(
        self,
        *,
        host: str = LOOPBACK,
        listening: socket.socket | None = None,
        body_s: float = 60.0,
        comment_s: float = 15.0,
    ) -> None:
        if not is_loopback(host):
            log.warning(
                "the endpoint listens on %s: whoever reaches it and has a key can use the policy",
                host,
            )
        self._body_s, self._comment_s = body_s, comment_s
        # by the hash of a key, so that no comparison tells how much of a key is right
        self._sessions: dict[str, Session] = {}
        # hashes of the keys of sessions that have ended, newest last
        self._past: dict[str, None] = {}
        self._lock = threading.Lock()
        self._any_key: Session | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._noted: set[str] = set()
        self.loop = asyncio.new_event_loop()
        listening = listening or listening_socket(host, 0)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{listening.getsockname()[1]}/v1"
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listening, ready), daemon=True)
        self._thread.start()
        ready.wait()
        self._close = weakref.finalize(self, _stop, self.loop, self._thread)

    def open(self, session: Session) -> None:
        """Take requests of a session."""
        self._sessions[key_digest(session.key)] = session
        if session.reward_key is not None:
            self._sessions[key_digest(session.reward_key)] = session

    def open_to_all(self, session: Session) -> None:
        """Take requests of this machine with any key, or none, as those of a session."""
        self._any_key = session

    def end(self, session: Session) -> None:
        """End a session: later requests get status 410."""
        session.close()
        # environments end their sessions in threads of their own
        with self._lock:
            for key in filter(None, (session.key, session.reward_key)):
                self._sessions.pop(key_digest(key), None)
                self._past[key_digest(key)] = None
            while len(self._past) > _MAX_PAST:
                del self._past[next(iter(self._past))]

    def watch(self, connection: socket.socket, session: Session) -> None:
        """Put an `EXIT` event into a session once a connection has brought an outcome and is closed."""
        self.loop.call_soon_threadsafe(watch_exit, self.loop, connection, session)

    def close(self) -> None:
        """Stop the server."""
        self._close()

    def _run(self, listening: socket.socket, ready: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        app = web.Application(client_max_size=MAX_BODY)
        for prefix in ("/v1", "/s/{key}/v1"):
            for path, protocol in PROTOCOLS.items():
                app.router.add_post(prefix + path, self._handler(protocol))
            app.router.add_get(f"{prefix}/models", self._answering(self._models))
            app.router.add_post(f"{prefix}/rewards", self._answering(self._reward))
        app.router.add_route("*", "/{path:.*}", self._answering(self._unknown))
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=1.0,
            # a request whose client is gone is left, see `Session.leave`
            handler_cancellation=True,
            auto_decompress=False,
        )
        self.loop.run_until_complete(runner.setup())
        self.loop.run_until_complete(web.SockSite(runner, listening, backlog=_BACKLOG).start())
        self.loop.call_soon(ready.set)
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

    def _answering(
        self, handle: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that answers errors as OpenAI's API does, and notes those of requests that were no calls."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await handle(request)
            except RequestError as error:
                owner = self._sessions.get(key_digest(_key(request)), self._any_key)
                if owner is not None and not error.is_noted:
                    owner.note_refused(error)
                return _written(error)
            except (OSError, web.HTTPException):
                raise
            except Exception:
                log.exception("the endpoint failed at %s %s", request.method, request.path)
                return _written(RequestError(500, "the endpoint failed", code="endpoint_failed"))

        return answer

    def _session(self, request: web.Request) -> Session:
        """Return the session of a request.

        Raises:
            RequestError: Its key is unknown, or the session has ended.
        """
        key = _key(request)
        session = self._sessions.get(key_digest(key), self._any_key)
        if session is None and key_digest(key) in self._past:
            raise ended_error()
        if session is None or key == session.reward_key:
            raise RequestError(
                401, "unknown key: send the session's key as a bearer token", code="invalid_api_key"
            )
        if session.ended:
            raise ended_error()
        if session is self._any_key and (reason := refusal(request.headers)) is not None:
            raise RequestError(403, reason)
        return session

    async def _respond(self, request: web.Request, protocol: Protocol) -> web.StreamResponse:
        session = self._session(request)
        trains = _trains(request)
        data = await read_body(request, timeout_s=self._body_s)
        if session.ended:
            raise ended_error()
        digest = hashlib.sha256(request.path.encode() + data).hexdigest()
        call = session.find_retry(digest, retries=retries_of(request))
        if call is None:
            call = session.register(digest, id_prefix=protocol.id_prefix)
            read = partial(_read, protocol, data, session, trains=trains)
            if is_small(data):
                with self._refusing(call, request.path):
                    self._accept(call, *read(), path=request.path)
            else:
                self._run_task(self._begin(call, read, path=request.path))
        call.clients += 1
        delivered = False
        try:
            response = await self._write(request, protocol, call)
            delivered = True
            return response
        finally:
            session.disconnect(call, delivered=delivered)

    def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that is no part of a request, whose client may leave while another one waits for it."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin(self, call: Call, read: Callable[[], _Read], *, path: str) -> None:
        with self._refusing(call, path):
            self._accept(call, *await asyncio.to_thread(read), path=path)

    def _accept(
        self, call: Call, body: dict[str, Any], client: ClientRequest, *, path: str
    ) -> None:
        """Hand a request to the session's owner or to another model.

        Raises:
            RequestError: The session has ended.
        """
        session = call.session
        if client.model not in ("", session.model):
            self._run_task(self._forward(call, client.model, body, path=path))
            return
        self._note(client, session)
        if session.ended:
            raise ended_error()
        session.accept(call, client)

    async def _forward(self, call: Call, model: str, body: dict[str, Any], *, path: str) -> None:
        with self._refusing(call, path):
            call.session.forward(call, await passed_on(call.session, model, body, path))

    @contextmanager
    def _refusing(self, call: Call, path: str) -> Iterator[None]:
        """Refuse a call whose request fails in a block; its client would wait for ever."""
        try:
            yield
        except RequestError as error:
            call.session.refuse(call, error)
        except Exception:
            log.exception("the endpoint failed at %s", path)
            failed = RequestError(500, "the endpoint failed", code="endpoint_failed")
            call.session.refuse(call, failed)

    async def _write(
        self, request: web.Request, protocol: Protocol, call: Call
    ) -> web.StreamResponse:
        """Wait for a call's answer and write it.

        Raises:
            RequestError: The call was refused.
            ConnectionError: The client is gone.
        """
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        if request.transport is not None:
            # an answer is written once the last byte has left this process
            request.transport.set_write_buffer_limits(0)
        while True:
            # whether it streams is known once it was read
            comments = call.client is None or call.client.stream
            try:
                async with asyncio.timeout(self._comment_s if comments else None):
                    answer = await asyncio.shield(call.answer)
                break
            except TimeoutError:
                if call.client is None or not call.client.stream:
                    continue
                if not response.prepared:
                    await response.prepare(request)
                await response.write(b": waiting\n\n")
            except RequestError as error:
                if not response.prepared:
                    raise
                await response.write(protocol.error(error.body))
                await response.write_eof()
                return response
        if isinstance(answer, PassedOn):
            passed = web.Response(
                body=answer.body, status=answer.status, content_type=answer.content_type
            )
            return await _sent(passed, request)
        assert call.client is not None
        if not call.client.stream:
            return await _sent(web.json_response(protocol.whole(answer, call.client)), request)
        if not response.prepared:
            await response.prepare(request)
        for part in protocol.stream(answer, call.client):
            await response.write(part)
        await response.write_eof()
        return response

    def _note(self, client: ClientRequest, session: Session) -> None:
        """Log once what is not honoured."""
        sampling = {} if session.limits.sampling else client.sampling
        for name, value in (client.ignored | sampling).items():
            if name not in self._noted:
                self._noted.add(name)
                log.info(
                    "a program sends %s=%.200s, which is ignored: the run's config decides",
                    name,
                    value,
                )

    async def _models(self, request: web.Request) -> web.Response:
        session = self._session(request)
        names = [session.model, *session.upstream]
        models = [{"id": name, "object": "model", "owned_by": "ragen_pl"} for name in names]
        return web.json_response({"object": "list", "data": models})

    async def _reward(self, request: web.Request) -> web.Response:
        header = bearer_key(request.headers)
        session = self._sessions.get(key_digest(header))
        if session is None and key_digest(header) in self._past:
            raise ended_error()
        if session is None or header != session.reward_key:
            raise RequestError(
                401, "unknown key: rewards have a key of their own", code="invalid_api_key"
            )
        if session.ended:
            raise ended_error()
        data = await read_body(request, timeout_s=self._body_s)
        body = read_json(data) if is_small(data) else await asyncio.to_thread(read_json, data)
        _, given = read_as(_Reward, body)
        try:
            session.rewards.give(given["id"], given["reward"])
        except ValueError as error:
            raise RequestError(400, str(error), code="invalid_reward") from error
        return web.json_response({"id": given["id"]})

    async def _unknown(self, request: web.Request) -> web.Response:
        paths = ", ".join(f"POST /v1{path}" for path in PROTOCOLS)
        raise RequestError(
            404,
            f"{request.method} {request.path}: known are {paths} and GET /v1/models",
            code="unknown_url",
        )


def _read(protocol: Protocol, data: bytes, session: Session, *, trains: bool) -> _Read:
    body = read_json(data)
    model, limits = body.get("model") or "", session.limits
    if not isinstance(model, str):
        raise RequestError(400, f"model={model!r}: expected a name")
    # another model's endpoint reads its requests itself
    if model not in ("", session.model):
        return body, ClientRequest(chat=NO_REQUEST, model=model)
    client = protocol.read(
        body, session.images, unconstrained=limits.unconstrained, train=limits.train and trains
    )
    return body, client


def _key(request: web.Request) -> str:
    """Return the key of a request, in its path or as a bearer token."""
    return str(request.match_info.get("key") or bearer_key(request.headers))


def _trains(request: web.Request) -> bool:
    """Return whether a request's header lets the policy be trained on the response."""
    given = request.headers.get("x-train", "true")
    try:
        return read_truth(given)
    except ValueError:
        raise RequestError(400, f"x-train={shown(given)}: expected true or false") from None


async def _sent(response: web.Response, request: web.Request) -> web.Response:
    await response.prepare(request)
    await response.write_eof()
    return response


def _written(error: RequestError) -> web.Response:
    return web.json_response(error.body, status=error.status, headers=error.headers)


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(loop.stop)
    if threading.current_thread() is not thread:
        thread.join(timeout=5.0)
