"""The connection between the ranks of a run by which an error on one of them ends all.

    error, or a connection that closes -> hub of the first rank -> every rank: main thread interrupted -> process ended

A rank that waits in a collective learns nothing of an error elsewhere before the time limit of its process group. So
each process keeps a connection to the first rank's, served by a thread. It needs no collective, a busy process does not
look like a dead one, and the kernel closes it however a process ends. A process that is frozen is left to the time
limit. This file imports neither torch nor lightning.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any

from ragen_pl.base import stop_signals
from ragen_pl.base.machine import print_stacks
from ragen_pl.config.ending import Ending
from ragen_pl.ranks.rank_hub import (
    CAUSE_S,
    LONGEST_MESSAGE,
    MEETING_S,
    NO_MESSAGE,
    NO_RANK,
    RETRY_S,
    SIGN_S,
    Failure,
    Hub,
    Meeting,
    failure_of,
    keep_alive,
    received,
    send,
)
from ragen_pl.ranks.rank_limits import StallLimit
from ragen_pl.ranks.rank_threads import in_thread, until_done

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# ignored by a process without a handler
_INTERRUPT = signal.SIGURG
# seconds: for an answer of the first rank, and for a rank to end by itself
_ANSWER_S, _END_S = 5.0, 15.0
# attempts after which a launched rank takes the first one for dead
_REFUSALS = 10
# characters of an error that is sent to other ranks
_LONGEST = 4000


class RankFailedError(SystemExit):
    """Another rank has failed. It is a SystemExit, which no code takes for an error of its own."""


class RankWatch:
    """This process's connection to the first rank. The first rank has the hub, and a connection to it too.

    Args:
        rank: Number of this rank.
        count: Number of ranks, if it is known.
        address: `host:port:token` of the hub for a rank that another one has launched.
        meeting: Where to find or leave the address otherwise; None in a first rank that launches the others.
        launched: Whether Lightning's launcher, in another rank, watches the exit code of this process.
        remedy: Returns what the first rank prints after another one's unexpected error.
        shows: Whether this process prints an error that is not one rank's own; one on each machine does.

    Attributes:
        stall: Longest time in which nothing happens.
    """

    def __init__(
        self,
        rank: int,
        *,
        count: int | None = None,
        address: str | None = None,
        meeting: Meeting | None = None,
        launched: bool = False,
        remedy: Callable[[], str] | None = None,
        shows: bool = True,
    ) -> None:
        self.stall = StallLimit()
        self.rank, self.count, self.host = rank, count, socket.gethostname()
        self.failure: Failure | None = None
        self._known, self._meeting, self._launched = address, meeting, launched
        self._remedy, self._shows = remedy, shows
        self._messages: dict[str, Any] = {}
        self._arrived = threading.Condition()
        self._found = ""
        self._hub = Hub(self._decide) if rank == 0 else None
        self._own: Ending | None = None
        self._left = self._ending = self._shown = False
        self._serving, self._joined, self._decided = (threading.Event() for _ in range(3))
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[dict[str, Any]] = []
        self._in_main = threading.current_thread() is threading.main_thread()
        if self._in_main:
            self._handler = signal.signal(_INTERRUPT, self._interrupted)
            stop_signals.explained_by(self._cause_of_signal)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    # ---- for the main thread

    @property
    def address(self) -> str | None:
        """The hub's `host:port:token` for ranks that this process launches; None where another rank has the hub."""
        self._serving.wait(_ANSWER_S if self._hub is not None else 0)
        return self._known

    @property
    def has_left(self) -> bool:
        """Whether this rank has said that it ends by itself."""
        return self._left

    @property
    def code(self) -> int:
        """Exit code of this process after a failure.

        It is 0 for a launched rank: Lightning kills the first rank, which reports, for another's code.
        """
        if self.failure is None:  # the first rank has not answered
            return 1 if self._own is None else self._own.code
        return 0 if self._launched else self.failure.code

    def report(self, ending: Ending) -> None:
        """Send this rank's error to all ranks. It ends them unless the error of another one came before."""
        if self._own is not None or self._left:
            return
        self._own, self._ending = ending, True
        message: dict[str, Any] = {"line": ending.line[:_LONGEST], "code": ending.code}
        delay = 0.0
        if not ending.expected:
            # it may be the closed connection to a rank that has failed, or the time limit of a wait for one that hangs
            message["place"], delay = self.stall.place, CAUSE_S
        self._loop.call_soon_threadsafe(self._loop.call_later, delay, self._say, message)

    def broadcast(self, message: dict[str, Any]) -> None:
        """Send a message to all ranks, of the first rank. `receive` waits for it."""
        assert self._hub is not None
        self._loop.call_soon_threadsafe(self._hub.tell, message)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the hub; see `ragen_pl.ranks.rank_hub`."""
        self._loop.call_soon_threadsafe(self._say, message)

    def receive(self, key: str, *, limit_s: float) -> Any:
        """Return the hub's message under a key, once it has been sent.

        Args:
            key: The key of the message.
            limit_s: Longest time to wait.

        Raises:
            RankFailedError: The run has failed.
            TimeoutError: The hub has said nothing in time, which the first rank has in its own process.
        """
        end = time.monotonic() + limit_s
        with self._arrived:
            while key not in self._messages:
                if self.failure is not None:
                    self._ending = True
                    raise RankFailedError(self.code)
                if (left := end - time.monotonic()) <= 0:
                    raise TimeoutError(f"no answer from the first rank for {limit_s:g} s")
                self._arrived.wait(left)
            return self._messages[key]

    def conclude(self, ending: Ending) -> bool:
        """Report this rank's error and wait for the one that ends the run. That of another rank is printed.

        Returns:
            Whether this rank's own error ends the run, and is left to be printed.
        """
        self.report(ending)
        self._decided.wait(CAUSE_S + (SIGN_S + _ANSWER_S if self._joined.is_set() else MEETING_S))
        if self.failure is None or self.failure.rank == self.rank:
            self._shown = True
            return True
        self.show()
        return False

    def stop(self, ending: Ending) -> int:
        """Let all ranks end with this one, which a signal has stopped and which says so itself.

        Returns:
            The exit code of this process.
        """
        self._shown = True
        self.report(ending)
        self._decided.wait(_ANSWER_S)
        return self.code

    def show(self) -> None:
        """Print the failure that ends the run, once in each process."""
        if self._shown or self.failure is None:
            return
        self._shown = True
        first = (self.failure.rank, self.failure.host) == (0, self.host)
        if self._launched and first and self.failure.line != NO_MESSAGE:
            # the rank that launched this one prints it, to the same output
            return
        if self.failure.rank == NO_RANK and not self._shows:
            return
        if self.failure.rank == self.rank:
            assert self._own is not None
            self._own.show()
        elif self._own is None or (self._own.line, self.host) != (
            self.failure.line,
            self.failure.host,
        ):
            # all ranks of a machine may have found the same error; one of them prints it
            line = str(self.failure)
            if self.rank == 0 and self._remedy is not None and self.failure.code == 1:
                line = "; ".join(filter(None, (line, self._remedy())))
            Ending(line).show()

    def leave(self) -> None:
        """Say that this rank ends by itself. Errors of other ranks do not concern it any more."""
        if not self._left:
            self._left = True
            if self.failure is None:
                self._joined.wait(_ANSWER_S)
            self._wait_for(self._leave(), limit=_ANSWER_S)

    def close(self) -> None:
        """End the connection. After a failure the first rank waits for the others, which are notified of it here."""
        if self._loop.is_closed():
            return
        # its end by force would hit what this process does later
        self.stall.stop()
        if self._hub is not None and self.failure is not None:
            self._wait_for(self._hub.emptied(self.count), limit=MEETING_S + _END_S)
        self._left = True
        if self._in_main:
            signal.signal(_INTERRUPT, self._handler or signal.SIG_DFL)
            stop_signals.explained_by(None)
            if self.failure is not None:
                # that of a launcher, which ends the other ranks
                stop_signals.ending()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ANSWER_S)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.failure is not None and not self._ending and not self._left:
            self._ending = True
            raise RankFailedError(self.code)

    def _cause_of_signal(self) -> RankFailedError | None:
        """Return the end by the code of the rank that has failed first, where a launcher ends the others by SIGTERM.

        The launcher's own code, by which a job is started again or not, is the highest one of all ranks.
        """
        if not self._left:
            self._decided.wait(_ANSWER_S)
        if self.failure is None or self._left:
            return None
        self._ending = True
        stop_signals.ending()
        return RankFailedError(self.code)

    def _wait_for(self, work: Coroutine[Any, Any, None], *, limit: float) -> None:
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(work, self._loop).result(limit)

    # ---- in the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        # the loop itself keeps no reference to a task, which would be collected
        self._tasks = [
            self._loop.create_task(work) for work in (self._watch(), self._look_for_stall())
        ]
        self._loop.run_forever()
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._hub is not None:
            self._hub.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        hub, meeting = self._hub, self._meeting
        if hub is not None:
            elsewhere = meeting is not None and meeting.host not in _LOOPBACK
            port = await hub.serve(host=None if elsewhere else _LOOPBACK[0])
            self._known = f"127.0.0.1:{port}:{hub.token}"
            self._serving.set()
            if meeting is not None:
                await until_done(lambda: meeting.publish(port, hub.token))
        reader = await self._connected()
        self._joined.set()
        for unsent in self._unsent:
            self._say(unsent)
        while message := await received(reader):
            self._left = self._left or "left" in message
            if "line" in message:
                self._decide(failure_of(message))
            elif "asked" in message:
                self._say({"here": True})
            else:
                self._hear(message)
        # the first rank may have been ended on purpose, as this one will be
        await asyncio.sleep(CAUSE_S)
        self._decide(Failure(0, self._found, NO_MESSAGE, 1))

    async def _look_for_stall(self) -> None:
        while (line := self.stall.expired) is None or self._left or self._own is not None:
            await asyncio.sleep(RETRY_S)
        print_stacks()
        self._own = Ending(line, code=1)
        self._say({"line": line, "code": 1})

    def _hear(self, message: dict[str, Any]) -> None:
        with self._arrived:
            self._messages |= message
            self._arrived.notify_all()

    async def _connected(self) -> asyncio.StreamReader:
        """Return the stream from the hub, once the first rank has one."""
        launched, refused = self._known is not None, 0
        while True:
            try:
                address = self._known or await in_thread(self._ask)
                self._found, port, token = address.rsplit(":", 2)
                reader, writer = await asyncio.open_connection(
                    self._found, int(port), limit=LONGEST_MESSAGE
                )
                keep_alive(writer)
                send(writer, {"token": token, "rank": self.rank, "host": self.host})
                answer = await received(reader)
                if answer is not None:
                    self._writer = writer
                    if "line" in answer:
                        self._decide(failure_of(answer))
                    self._hear(answer)
                    return reader
            except OSError:
                refused += 1
            if launched and refused == _REFUSALS:
                # it has had its hub before it launched this rank
                self._decide(Failure(0, self._found, NO_MESSAGE, 1))
            # none yet, or the address of ranks that have been restarted
            await asyncio.sleep(RETRY_S)

    def _ask(self) -> str:
        assert self._meeting is not None
        return self._meeting.address()

    def _decide(self, failure: Failure) -> None:
        """Note the failure that ends the run, and end this process: gently, then by force."""
        if self.failure is not None or self._left:
            return
        self.failure = failure
        self._decided.set()
        if self.rank in failure.late:
            print_stacks()
        with self._arrived:
            self._arrived.notify_all()
        main = threading.main_thread().ident
        if self._in_main and not self._ending and main is not None:
            signal.pthread_kill(main, _INTERRUPT)
        self._loop.call_later(_END_S, self._end_now)

    def _end_now(self) -> None:
        """End a process whose main thread waits in a collective, or does not end for another reason."""
        if not self._left:
            self.show()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)

    def _say(self, message: dict[str, Any]) -> None:
        if self._writer is None:
            self._unsent.append(message)
        else:
            send(self._writer, message)

    async def _leave(self) -> None:
        if self._hub is not None:
            self._hub.tell({"left": True})
        self._say({"left": True})
        if self._writer is not None:
            with suppress(OSError):
                await self._writer.drain()
