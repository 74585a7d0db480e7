"""A server on which others play environments, by the WebSocket messages of OpenEnv (0.10).

connection -> place of a session (CAPACITY_REACHED, FACTORY_ERROR) -> requests and answers in turn -> closed:
by the client; by the server with 1001 after a pause, where its episode is over and all places are taken,
and at the server's end; with 1011 where infrastructure has failed under its environment
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from ragen_pl.base.access import bearer_key, key_digest, refusal
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, Port, Positive
from ragen_pl.base.error_text import named_error
from ragen_pl.base.foreign_files import object_in
from ragen_pl.environments.hosted import (
    HostedEnvironment,
    Maker,
    Message,
    SessionBroken,
    error_message,
)

log = logging.getLogger(__name__)
KEY = "RAGEN_PL_ENVIRONMENT_KEY"
"""Variable of the environment with the key that clients have to send."""
_MIB = 1024 * 1024
# seconds between two pings, and for the other side to close a socket
_HEARTBEAT_S = 20.0


@checked
@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Keys of `server`.

    Attributes:
        host: Address that it listens at. Other ones than that of this machine itself need a key in
            RAGEN_PL_ENVIRONMENT_KEY.
        port: Port that it listens at; 0 for any free one.
        sessions: Sessions at once, each with an environment.
        idle_s: Seconds without a request after which a session is closed.
        message_mib: Longest message of a client in MiB.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    sessions: Count = 64
    idle_s: Positive = 600.0
    message_mib: Count = 4


@dataclass(kw_only=True, slots=True, eq=False)
class HostedSession:
    """A socket, the requests that wait, and its environment while it has one."""

    socket: web.WebSocketResponse
    requests: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    environment: HostedEnvironment | None = None
    # it has had an answer, and waits for none
    is_idle: bool = False
    last: float = field(default_factory=time.monotonic)

    @property
    def can_go(self) -> bool:
        """Whether the client has played its episode to the end and asks for nothing."""
        is_over = self.environment is not None and self.environment.is_over
        return is_over and self.is_idle and self.requests.empty()


class EnvironmentServer:
    """Sessions with environments.

    Args:
        make: Makes an environment.
        name: Name of the environment.
        target: Its gymnasium id or class path.
        timeout_s: Longest time of a reset or a step; None for no limit.
        settings: Limits.
        key: Key that clients have to send as a bearer token; None for none.

    Attributes:
        counts: Number of sessions, episodes, steps and refusals since the start.
    """

    def __init__(
        self,
        make: Maker,
        *,
        name: str,
        target: str,
        timeout_s: float | None,
        settings: ServerSettings,
        key: str | None = None,
    ) -> None:
        self.settings, self.name, self._key = settings, name, key
        self._make = partial(HostedEnvironment, make, target=target, timeout_s=timeout_s)
        self.open_sessions: set[HostedSession] = set()
        self._idle: list[HostedEnvironment] = []
        self._threads = ThreadPoolExecutor(settings.sessions + 1, "environments")
        self.counts: Counter[str] = Counter()
        self._members: Message = {}

    def prepare(self) -> None:
        """Make the first environment.

        Raises:
            Exception: It cannot be made.
        """
        first = self._make()
        self._members = first.described()
        self._idle.append(first)

    def app(self) -> web.Application:
        """Return the application; `prepare` comes before it."""
        app = web.Application(client_max_size=self.settings.message_mib * _MIB)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metadata", self._metadata)
        app.router.add_get("/schema", self._schema)
        app.router.add_get("/ws", self._serve)
        app.on_shutdown.append(self._shut_down)
        app.on_cleanup.append(self._clean_up)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        # that of a server with a key is for whoever looks after it
        if self._key is None:
            self._check(request)
        counts = ("sessions", "episodes", "steps", "repeated_steps", "full", "idle", "broken")
        return web.json_response(
            {
                "status": "healthy",
                "open": len(self.open_sessions),
                "capacity": self.settings.sessions,
                **{name: self.counts[name] for name in counts},
            }
        )

    async def _metadata(self, request: web.Request) -> web.Response:
        self._check(request)
        about = {"name": self.name, "description": self._members["instructions"]}
        return web.json_response(about | {"members": self._members})

    async def _schema(self, request: web.Request) -> web.Response:
        self._check(request)
        message: Message = {"type": "string"}
        if self._members["action_names"] is not None:
            message["enum"] = self._members["action_names"]
        texts = {"type": "array", "items": {"type": "string"}}
        return web.json_response(
            {
                "action": {
                    "type": "object",
                    "properties": {"message": message, "metadata": {"type": "object"}},
                    "required": ["message"],
                },
                "observation": {
                    "type": "object",
                    "properties": {"text": {"type": "string"}, "images": texts},
                },
                "state": {
                    "type": "object",
                    "properties": {
                        "episode_id": {"type": "string"},
                        "step_count": {"type": "integer"},
                    },
                },
            }
        )

    def _check(self, request: web.Request) -> None:
        """Refuse a request without the key; where there is none, one of another host or origin."""
        if self._key is None:
            if (reason := refusal(request.headers)) is not None:
                raise web.HTTPForbidden(text=reason)
        elif key_digest(bearer_key(request.headers)) != key_digest(self._key):
            raise web.HTTPUnauthorized(text=f"send the server's {KEY} as a bearer token")

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        self._check(request)
        socket = web.WebSocketResponse(
            heartbeat=_HEARTBEAT_S, max_msg_size=self.settings.message_mib * _MIB
        )
        await socket.prepare(request)
        if len(self.open_sessions) >= self.settings.sessions:
            await self._make_room()
        if len(self.open_sessions) >= self.settings.sessions:
            self.counts["full"] += 1
            await socket.send_json(
                error_message(
                    "CAPACITY_REACHED", f"all {self.settings.sessions} sessions are taken"
                )
            )
            await socket.close(code=WSCloseCode.TRY_AGAIN_LATER)
            return socket
        session = HostedSession(socket=socket)
        self.open_sessions.add(session)
        self.counts["sessions"] += 1
        work = asyncio.create_task(self._work(session))
        try:
            # read at all times, which answers pings while a step is under way
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    session.requests.put_nowait(message.data)
                elif message.type is WSMsgType.BINARY:
                    session.requests.put_nowait("")
        finally:
            session.requests.put_nowait(None)
            # an environment under way is not another session's
            await asyncio.shield(work)
        return socket

    async def _work(self, session: HostedSession) -> None:
        """Answer the requests of a session until it is closed, and give its environment back."""
        try:
            session.environment = await self._environment()
            await self._answer_all(session)
        except SessionBroken as error:
            self.counts["broken"] += 1
            await self.say(session, error_message("SESSION_ERROR", str(error)))
            await session.socket.close(code=WSCloseCode.INTERNAL_ERROR)
        except Exception as error:  # of a constructor
            text = named_error(error)
            log.warning("an environment cannot be made: %s", text)
            await self.say(session, error_message("FACTORY_ERROR", text))
            await session.socket.close(code=WSCloseCode.INTERNAL_ERROR)
        finally:
            self.open_sessions.discard(session)
            self._give_back(session.environment)
            session.environment = None

    async def _environment(self) -> HostedEnvironment:
        return self._idle.pop() if self._idle else await self._in_thread(self._make)

    async def _answer_all(self, session: HostedSession) -> None:
        environment = session.environment
        assert environment is not None
        while True:
            try:
                text = await asyncio.wait_for(session.requests.get(), self.settings.idle_s)
            except TimeoutError:
                self.counts["idle"] += 1
                pause = f"no request for {self.settings.idle_s:g} s"
                await session.socket.close(code=WSCloseCode.GOING_AWAY, message=pause.encode())
                return
            request = _request(text)
            if text is None or request.get("type") == "close":
                await session.socket.close()
                return
            session.is_idle = False
            if not environment.is_usable:
                # after an error of its own
                self._give_back(environment)
                session.environment = environment = await self._in_thread(self._make)
            steps, repeated = environment.steps, environment.repeated
            answer = await self._in_thread(partial(_answer, environment, request))
            self.counts["steps"] += environment.steps - steps
            self.counts["repeated_steps"] += environment.repeated - repeated
            self.counts["episodes"] += request.get("type") == "reset"
            await self.say(session, answer)
            session.is_idle, session.last = True, time.monotonic()

    async def _make_room(self) -> None:
        """Close the session whose episode has been over for longest."""
        over = [session for session in self.open_sessions if session.can_go]
        if over:
            session = min(over, key=lambda one: one.last)
            self.open_sessions.discard(session)
            message = b"the episode is over, and another session wants the place"
            await session.socket.close(code=WSCloseCode.GOING_AWAY, message=message)

    def _give_back(self, environment: HostedEnvironment | None) -> None:
        if environment is None:
            return
        if environment.is_usable:
            self._idle.append(environment)
        else:
            self._threads.submit(environment.close)

    async def _in_thread(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def say(self, session: HostedSession, message: Message) -> None:
        """Send a message to the client of a session."""
        # a client that has gone asks again elsewhere
        if not session.socket.closed:
            try:
                await session.socket.send_json(message)
            except (ConnectionError, RuntimeError):
                log.debug("a client has gone before its answer")

    async def _shut_down(self, app: web.Application) -> None:
        closing = [
            session.socket.close(code=WSCloseCode.GOING_AWAY, message=b"the server ends")
            for session in self.open_sessions
        ]
        await asyncio.gather(*closing, return_exceptions=True)

    async def _clean_up(self, app: web.Application) -> None:
        for environment in self._idle:
            environment.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _request(text: str | None) -> Message:
    """Return a message; one of no type where it is no JSON object."""
    return object_in(text or "") or {"invalid": True}


def _answer(environment: HostedEnvironment, request: Message) -> Message:
    if "invalid" in request:
        return error_message("INVALID_JSON", "expected a JSON object")
    return environment.answer(request)
