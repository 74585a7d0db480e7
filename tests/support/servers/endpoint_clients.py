"""A session of the endpoint with an owner of the tests, and clients with real sockets."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image

from ragen_pl.agent_programs.serving.chat_response import Answer
from ragen_pl.agent_programs.serving.errors import RequestError
from ragen_pl.agent_programs.serving.server import AgentServer
from ragen_pl.agent_programs.serving.session import Call, Event, EventKind, Session

LIMIT_S = 120.0
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "now", "parameters": {"type": "object"}},
}

CALLS = [
    {"id": "call00000", "name": "weather", "arguments": {"at": "Köln", "days": [1, {"a": None}]}},
    {"id": "call00001", "name": "weather", "arguments": {}},
]
LOGPROBS = [("h", -0.5), ("ö", -1.25)]


def data_url(kind: str = "PNG", *, size: tuple[int, int] = (3, 2)) -> str:
    """Return an image as a URL that holds it."""
    file = io.BytesIO()
    Image.new("RGB", size, (200, 0, 0)).save(file, kind)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(file.getvalue()).decode()


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "the condition does not come true"
        time.sleep(0.002)


def answer_of(call: Call, content: str = "hi", **changes: Any) -> Answer:
    """Return an answer to a call."""
    message = {"role": "assistant", "content": content} | changes.pop("message", {})
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    values = {"finish_reason": reason, "prompt_tokens": 7, "completion_tokens": 3} | changes
    return Answer(id=call.id, model="policy", message=message, created=1, **values)


def take(session: Session, kind: EventKind = EventKind.REQUEST) -> Call:
    """Return the call of the session's next event, which is of this kind."""
    event = session.events.get(timeout=LIMIT_S)
    assert event.kind is kind, event
    assert event.call is not None
    return event.call


class Owner:
    """Answers each request of a session in a thread, and keeps the events."""

    def __init__(
        self, session: Session, respond: Callable[[Call], Answer | RequestError] = answer_of
    ) -> None:
        self.session, self.respond = session, respond
        self.events: list[Event] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            event = self.session.events.get()
            if event.kind is EventKind.EXIT:
                return
            self.events.append(event)
            if event.kind is EventKind.REQUEST and event.call is not None:
                self.session.answer(event.call, self.respond(event.call))

    def of(self, kind: str) -> list[str]:
        """Return the ids of the calls with an event of a kind."""
        return [event.call.id for event in self.events if event.kind == kind and event.call]

    def wait_for(self, kind: str, *, count: int) -> None:
        """Wait for the events of calls; that of a delivery may come after the client has read its answer."""
        end = time.monotonic() + LIMIT_S
        while len(self.of(kind)) < count:
            assert time.monotonic() < end, f"{len(self.of(kind))} of {count} {kind} events"
            time.sleep(0.01)

    def end(self) -> None:
        self.session.events.put(Event(EventKind.EXIT))
        self._thread.join(LIMIT_S)


@contextmanager
def owned(
    server: AgentServer, respond: Callable[[Call], Answer | RequestError] = answer_of, **limits: Any
) -> Iterator[Owner]:
    """Open a session whose requests are answered."""
    session = opened(server, **limits)
    owner = Owner(session, respond)
    try:
        yield owner
    finally:
        owner.end()
        server.end(session)


def opened(server: AgentServer, **values: Any) -> Session:
    """Return a session that the server takes requests for."""
    session = Session(server.loop, **values)
    server.open(session)
    return session


def connect(server: AgentServer) -> http.client.HTTPConnection:
    host, _, port = server.url.removeprefix("http://").removesuffix("/v1").rpartition(":")
    return http.client.HTTPConnection(host, int(port), timeout=LIMIT_S)


def send(
    server: AgentServer,
    body: object,
    *,
    key: str,
    path: str = CHAT,
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> http.client.HTTPConnection:
    """Send a request and return the connection, which has not been read."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = connect(server)
    given = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request(method, path, body=data, headers=given | (headers or {}))
    return connection


def read(connection: http.client.HTTPConnection) -> tuple[int, Any]:
    """Return status and JSON of an answer, or the events of a stream."""
    response = connection.getresponse()
    data = response.read()
    connection.close()
    if response.headers.get_content_type() == "text/event-stream":
        return response.status, data.decode().split("\n\n")[:-1]
    return response.status, json.loads(data)


def post(server: AgentServer, body: object, **changes: Any) -> tuple[int, Any]:
    """Return status and JSON of the answer to a request."""
    return read(send(server, body, **changes))


def hang_up(connection: http.client.HTTPConnection) -> None:
    """Close a connection before its answer was read."""
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def assembled(events: list[str]) -> dict[str, Any]:
    """Return the chunks of a stream as the completion that they make, as SDKs assemble them."""
    assert events[-1] == "data: [DONE]"
    values = [json.loads(each.removeprefix("data: ")) for each in events[:-1] if each[0] != ":"]
    first = values[0]
    message: dict[str, Any] = {"refusal": None}
    choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None}
    usage = None
    for value in values:
        assert value["object"] == "chat.completion.chunk"
        usage = value.get("usage") or usage
        for part in value["choices"]:
            choice["finish_reason"] = part["finish_reason"]
            choice["logprobs"] = part["logprobs"] or choice["logprobs"]
            for name, delta in part["delta"].items():
                if name == "tool_calls":
                    for call in delta:
                        calls = message.setdefault(name, [])
                        assert call.pop("index") == len(calls)
                        calls.append(call)
                elif isinstance(message.get(name), str) and name != "role":
                    message[name] += delta
                else:
                    message[name] = delta
    return {
        "id": first["id"],
        "object": "chat.completion",
        "created": first["created"],
        "model": first["model"],
        "choices": [choice],
        "usage": usage,
    }
