"""The first rank's connections to all ranks of a run, and the messages on them: `ragen_pl.run.rank_watch`.

rank -> hub: {"token", "rank", "host"} once, {"line", "code"} of an error, {"left"} before its end
hub -> rank: {"welcome"} once, a `Failure` once, {"left"} before the end of the first rank
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakSet

CAUSE_S = 1.0
"""Seconds for the cause of an error to arrive before its consequence is reported."""

MEETING_S = 20.0
"""Seconds that a rank with an error waits for ranks that have yet to start."""

RETRY_S = 0.2
"""Seconds between two looks for another rank."""

NO_WORD = "no error message; its process may have been killed, for example for want of memory"
"""Error of a rank that has closed its connection without a message."""

# a machine that lost power closes no connection; it is found after 10 s and three more times 5 s
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_CONNECTIONS: WeakSet[asyncio.StreamWriter] = WeakSet()


def _close_in_fork() -> None:
    """Close the connections in a forked child, which would keep them open beyond the end of the rank."""
    for writer in list(_CONNECTIONS):
        if (descriptor := writer.get_extra_info("socket").fileno()) >= 0:
            os.close(descriptor)


os.register_at_fork(after_in_child=_close_in_fork)


@dataclass(frozen=True, slots=True)
class Failure:
    """Error or signal that ended a rank.

    Attributes:
        rank: Number of the rank.
        host: Name of its machine.
        line: The error in one line.
        code: Exit code of the run.
    """

    rank: int
    host: str
    line: str
    code: int

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}) failed: {self.line}"


class Hub:
    """The first rank's connections to all ranks.

    Args:
        decided: Called once, with the first failure.
    """

    def __init__(self, decided: Callable[[Failure], None]) -> None:
        self.token = secrets.token_hex(8)
        self._decided = decided
        self._failure: Failure | None = None
        self._server: asyncio.Server | None = None
        self._members: dict[int, asyncio.StreamWriter] = {}
        self._seen: set[int] = set()

    async def serve(self, *, host: str | None) -> int:
        """Accept connections, and return their port.

        Args:
            host: address that they come to; None for all of this machine's.
        """
        self._server = await asyncio.start_server(self._serve, host, port=0, family=socket.AF_INET)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Accept no more connections, and end those that there are."""
        if self._server is not None:
            self._server.close()
        for writer in self._members.values():
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):
            await self._hear(reader, writer)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a rank until it ends."""
        hello = await received(reader)
        if hello is None or hello.get("token") != self.token:
            writer.close()
            return
        keep_alive(writer)
        rank, host, left = int(hello["rank"]), str(hello["host"]), False
        self._members[rank] = writer
        self._seen.add(rank)
        send(writer, {"welcome": rank} if self._failure is None else asdict(self._failure))
        while message := await received(reader):
            left = left or "left" in message
            if "line" in message:
                self._decide(Failure(rank, host, message["line"], message["code"]))
        self._members.pop(rank, None)
        writer.close()
        if not left:
            # this process may be about to end too, by its own wish
            await asyncio.sleep(CAUSE_S)
            self._decide(Failure(rank, host, NO_WORD, 1))

    def _decide(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            self.tell(asdict(failure))
            self._decided(failure)

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message to all ranks."""
        for writer in self._members.values():
            send(writer, message)

    async def emptied(self, count: int | None) -> None:
        """Wait until the other ranks have ended; of a known number also those that have yet to start."""
        for _ in range(int(MEETING_S / RETRY_S)):
            if len(self._seen) >= (count or 1):
                break
            await asyncio.sleep(RETRY_S)
        while self._members.keys() - {0}:
            await asyncio.sleep(RETRY_S)


async def received(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message; None at the end of the connection, or if it is no message."""
    try:
        line = await reader.readline()
        return dict(json.loads(line)) if line else None
    except (OSError, ValueError):
        return None


def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send a message, unless the connection has ended."""
    with suppress(OSError):
        writer.write(json.dumps(message).encode() + b"\n")


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Let the kernel find out when the other machine is gone, and keep the connection to this process."""
    _CONNECTIONS.add(writer)
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # of Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
