"""The first rank's connections to all ranks of a run, and the messages on them: `ragen_pl.ranks.rank_watch`.

rank -> hub: {"token", "rank", "host"} once, {"line", "code"} of an error, with {"place"} if another rank that hangs may
             be its cause, {"left"} before its end, {"change"} at a change of phase, {"facts", "count"} for the
             comparison at the start, {"here"} as an answer
hub -> rank: {"welcome"} once, a `Failure` once, {"left"} before the end of the first rank, what that rank tells all,
             {"asked"} for an answer, which the process's thread gives whatever its main thread waits for
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol
from weakref import WeakSet

from ragen_pl.ranks.rank_limits import Arrivals, Change, named_ranks
from ragen_pl.ranks.same_run import differences

CAUSE_S = 1.0
"""Seconds for the cause of an error to arrive before its consequence is reported."""

MEETING_S = 20.0
"""Seconds that a rank with an error waits for ranks that have yet to start."""

SIGN_S = 10.0
"""Seconds that a rank may take to answer. One whose process runs answers at once."""

RETRY_S = 0.2
"""Seconds between two looks for another rank."""

NO_RANK = -1
"""Number in a failure that is not one rank's own."""

# seconds between two looks for late ranks
_LATE_S = 0.5
# bytes of a message
LONGEST_MESSAGE = 2**22

NO_MESSAGE = "no error message; its process may have been killed, as for want of memory, or its machine is cut off"
"""Error of a rank that has closed its connection without a message."""

# a machine that lost power closes no connection; it is found after 10 s and three more times 5 s, and if it owes an
# answer to what was sent after as many milliseconds
_KEEP_ALIVE = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 25_000,
}
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
        rank: Number of the rank, or `NO_RANK`.
        host: Name of its machine.
        line: The error in one line.
        code: Exit code of the run.
        late: Ranks that were waited for, which print what they are doing.
    """

    rank: int
    host: str
    line: str
    code: int
    late: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.rank == NO_RANK:
            return self.line
        return f"rank {self.rank} ({self.host}) failed: {self.line}"


class Meeting(Protocol):
    """Where ranks that were started from outside find the first one. Both methods block.

    Attributes:
        host: Machine of the first rank, as the other ones name it.
    """

    host: str

    def publish(self, port: int, token: str) -> None:
        """Leave the port and token of the first rank's hub.

        Raises:
            OSError: That is not possible yet.
        """

    def address(self) -> str:
        """Return `host:port:token`.

        Raises:
            OSError: The first rank has not left it yet.
        """
        ...


def failure_of(message: dict[str, Any]) -> Failure:
    """Return the failure of a message of the hub."""
    return Failure(**message | {"late": tuple(message["late"])})


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
        self._hosts: dict[int, str] = {}
        self._ended: set[int] = set()
        self._here: set[int] = set()
        self._silent: set[int] = set()
        # have closed their connection without a word
        self._lost: set[int] = set()
        self._asking: asyncio.Task[None] | None = None
        self._arrivals = Arrivals()
        self._facts: dict[int, dict[str, Any]] = {}
        # told to ranks that come later, too
        self._told: dict[str, Any] = {}

    async def serve(self, *, host: str | None) -> int:
        """Accept connections, and return their port.

        Args:
            host: Address that they come to; None for all of this machine's.
        """
        self._server = await asyncio.start_server(
            self._serve, host, port=0, family=socket.AF_INET, limit=LONGEST_MESSAGE
        )
        # the loop itself keeps no reference to a task
        self._looking = asyncio.get_running_loop().create_task(self._look_for_late_ranks())
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Accept no more connections, and end those that there are."""
        if self._server is not None:
            self._server.close()
            self._looking.cancel()
            if self._asking is not None:
                self._asking.cancel()
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
        rank, host = int(hello["rank"]), str(hello["host"])
        self._members[rank], self._hosts[rank] = writer, host
        welcome = {"welcome": rank} | self._told
        send(writer, welcome if self._failure is None else asdict(self._failure))
        while message := await received(reader):
            self._note(rank, message)
        self._members.pop(rank, None)
        writer.close()
        if rank not in self._ended:
            self._lost.add(rank)
            # this process may be about to end too, by its own wish
            await asyncio.sleep(CAUSE_S)
            self._decide(Failure(rank, host, NO_MESSAGE, 1))

    def _note(self, rank: int, message: dict[str, Any]) -> None:
        """Note what a rank says."""
        if "left" in message:
            self._ended.add(rank)
        if "change" in message:
            self._arrivals.note(rank, Change(**message["change"]), now=time.monotonic())
        if "facts" in message:
            self._facts[rank] = message["facts"]
            if len(self._facts) == message["count"]:
                self._compare()
        if "here" in message:
            self._here.add(rank)
        if "line" in message:
            failure = Failure(rank, self._hosts[rank], message["line"], message["code"])
            if "place" not in message:
                self._decide(failure)
            elif self._asking is None:
                self._asking = asyncio.get_running_loop().create_task(
                    self._ask(failure, message["place"])
                )

    async def _ask(self, failure: Failure, place: str) -> None:
        """Ask all ranks for an answer, and name those that give none: the error of a collective names no rank."""
        self._here = {failure.rank}
        for writer in self._members.values():
            send(writer, {"asked": True})
        end = time.monotonic() + SIGN_S
        while (silent := self._members.keys() - self._here) and time.monotonic() < end:
            await asyncio.sleep(RETRY_S)
        if self._lost:
            # that is the cause, and is about to be decided; a rank that was killed has given no answer until here
            return
        if silent:
            self._silent = set(silent)
            named = named_ranks(sorted(silent), self._hosts)
            line = f"no answer from {named} for {SIGN_S:g} s, frozen or cut off; {failure}"
            failure = Failure(NO_RANK, "", f"{place}: {line}" if place else line, failure.code)
        self._decide(failure)

    def _compare(self) -> None:
        """Compare the facts of all ranks, and let these go on or end them."""
        line = differences(self._facts, self._hosts)
        if line is None:
            self.tell({"agreed": True})
        else:
            self._decide(Failure(NO_RANK, "", line, 2))

    async def _look_for_late_ranks(self) -> None:
        while True:
            await asyncio.sleep(_LATE_S)
            if late := self._arrivals.late(now=time.monotonic(), ended=self._ended):
                line = late.line(self._hosts)
                self._decide(Failure(NO_RANK, "", line, 1, late.ranks))
                return

    def _decide(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            self.tell(asdict(failure))
            self._decided(failure)

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message to all ranks. Those that come later get what it says with their welcome."""
        self._told |= message if self._failure is None else {}
        for writer in self._members.values():
            send(writer, message)

    async def emptied(self, count: int | None) -> None:
        """Wait until the other ranks that answer have ended; of a known number also those that have yet to start."""
        for _ in range(int(MEETING_S / RETRY_S)):
            if len(self._hosts) >= (count or 1):
                break
            await asyncio.sleep(RETRY_S)
        while self._members.keys() - {0} - self._silent:
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
