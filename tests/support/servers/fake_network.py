"""A proxy that breaks and spoils transfers, and a router that forwards requests to servers in turn."""

from __future__ import annotations

import itertools
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


class Forwarding(ThreadingHTTPServer):
    """Forwards each request. `asked` has the path and the headers of those that came."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.place = f"127.0.0.1:{self.server_port}"
        self.url = f"http://{self.place}"
        self.thread = threading.Thread(target=self.serve_forever, args=(0.005,))
        self.thread.start()

    def target(self) -> str:
        """Return the address of who answers the next request."""
        raise NotImplementedError

    def managed(self, path: str) -> bool:
        """Return whether a request is one to this process, after doing what it asks for."""
        return False

    def changed(self, path: str, data: bytes) -> tuple[bytes, int]:
        """Return the bytes of an answer, and how many of them are sent before the connection breaks."""
        return data, len(data)

    def close(self) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Forwarding

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length) if length else None
        headers = dict(self.headers)
        self.server.asked.append((self.path, headers))
        if self.server.managed(self.path):
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"Done")
            return
        asked = urllib.request.Request(self.server.target() + self.path, body, headers)
        try:
            with urllib.request.urlopen(asked) as answer:
                status, data, found = answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            status, data, found = error.code, error.read(), error.headers
        except OSError:
            status, data, found = 502, b"", {}
        data, sent = self.server.changed(self.path, data)
        with suppress(OSError):  # the client has gone
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if "Content-Range" in found:
                self.send_header("Content-Range", found["Content-Range"])
            self.end_headers()
            self.wfile.write(data[:sent])
            if sent < len(data):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)


class Proxy(Forwarding):
    """Forwards to one server. It breaks the next transfers after so many bytes, and flips a byte of the next ones.

    Args:
        target: Address of that server.
    """

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = target
        self.breaks: list[int] = []
        self.flips = 0

    def target(self) -> str:
        return self._target

    def changed(self, path: str, data: bytes) -> tuple[bytes, int]:
        if not path.endswith(".safetensors"):
            return data, len(data)
        if self.flips:
            self.flips -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        return data, self.breaks.pop(0) if self.breaks else len(data)


class Router(Forwarding):
    """Forwards to servers in turn. They can be removed and added.

    Args:
        targets: Addresses of the servers.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        super().__init__()
        self.targets, self._turns = list(targets), itertools.count()

    def target(self) -> str:
        return self.targets[next(self._turns) % len(self.targets)]

    def managed(self, path: str) -> bool:
        url = unquote(path.partition("?url=")[2])
        if path.startswith("/remove_worker"):
            self.targets.remove(url)
        elif path.startswith("/add_worker"):
            self.targets.append(url)
        return bool(url)
