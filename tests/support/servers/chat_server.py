"""A server of the tests that answers chat completions, as an OpenAI-compatible API does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "sk-a-key-of-this-test"


class ChatServer(ThreadingHTTPServer):
    """Answers chat completions.

    `faults` are answers to the first requests: a status, or the name of what to do. `breaks` says the fault for any
    later request, None for an answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict] = []
        self.keys: set[str] = set()
        self.faults: list[int | str] = []
        self.breaks: Callable[[dict], int | str | None] = lambda request: None
        self.fails_from: int | None = None
        self.text: str | None = None
        self.message: dict = {}
        self.finish_reason = "stop"
        self.usage: object = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        self.error = f"no, {KEY}"
        self.delay = 0.0
        self.sent = self.under_way = self.most_under_way = 0
        # answers wait until so many requests have been under way at once
        self.together = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.sent += 1
            server.keys.add(self.headers["Authorization"])
            fault = server.faults.pop(0) if server.faults else server.breaks(request)
            if fault is None:
                server.requests.append(request)
            if server.fails_from is not None and len(server.requests) > server.fails_from:
                fault = 400
            server.under_way += 1
            server.most_under_way = max(server.most_under_way, server.under_way)
        time.sleep(server.delay)
        while server.most_under_way < server.together:
            time.sleep(0.005)
        if fault == "late":
            time.sleep(6.0)
        # before the answer: its client sends the next request as soon as it has it
        with server.lock:
            server.under_way -= 1
        with suppress(OSError):  # the client has given up
            self.answer(request, fault)

    def answer(self, request: dict, fault: int | str | None) -> None:
        if fault == "close":
            self.connection.close()
            return
        status = 200
        body: object = completion(self.server, request)
        if fault in UNUSABLE:
            body = UNUSABLE[fault]
        elif fault == "quota":
            status = 429
            body = {"error": {"message": "pay first", "type": "insufficient_quota"}}
        elif isinstance(fault, int):
            status = fault
            body = {"error": {"message": self.server.error, "code": "refused"}}
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        if fault == "huge":
            data = b" " * 3 * 2**20
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if fault == 429:
            self.send_header("Retry-After", "0.05")
        missing = {"cut": 1, "drip": 2**20}.get(fault, 0)
        self.send_header("Content-Length", str(len(data) + missing))
        self.end_headers()
        while fault == "drip":  # until the client gives up
            time.sleep(0.05)
            self.wfile.write(b" ")
        self.wfile.write(data)


# answers of status 200 that hold no answer
UNUSABLE: dict[int | str | None, object] = {
    "garbage": json.dumps("no completion"),
    "html": "<html>please log in</html>",
    "error": {"error": {"message": "upstream is down", "code": 502}},
    "sse": 'data: {"choices": []}\n\ndata: [DONE]\n\n',
    "no choices": {"choices": []},
    "null choices": {"choices": None, "usage": {"prompt_tokens": 7, "completion_tokens": 0}},
    "null choice": {"choices": [None]},
    "null message": {"choices": [{"message": None}]},
    "empty message": {"choices": [{"message": {}}]},
    "number": {"choices": [{"message": {"content": 5}}]},
    "picture": {"choices": [{"message": {"content": [{"type": "image_url"}]}}]},
    "deep": "[" * 100_000,
    "list": "[]",
    "nothing": "",
    "bytes": "\x00\xff",
}


def completion(server: ChatServer, request: dict) -> dict:
    text = walk(request["messages"][-1]["content"]) if server.text is None else server.text
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": request["model"],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, **server.message},
                "finish_reason": server.finish_reason,
            }
        ],
        "usage": server.usage,
    }


def walk(observation: str | list) -> str:
    """Return a move towards the goal, for observations such as `me 1 2 goal 3 0 holes 0 1`."""
    move = "Up"
    if isinstance(observation, str):
        words = observation.split()
        (row, column), (goal_row, goal_column) = (map(int, words[i : i + 2]) for i in (1, 4))
        move = "Down" if goal_row > row else "Up" if goal_row < row else ""
        move = move or ("Right" if goal_column > column else "Left")
    return f"<think>on my way</think><answer>{move}</answer>"


@contextmanager
def serving() -> Iterator[ChatServer]:
    """Run a server."""
    server = ChatServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
