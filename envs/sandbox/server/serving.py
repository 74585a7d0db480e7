"""The loop of the server: children are started ahead of requests, and ended after them.

Most of a program's time is the start and the end of its child. Both are done while no request waits: children are
started ahead, twice as many whenever there were too few, and those that have answered are stopped until they are ended.
"""

from __future__ import annotations

import collections
import gc
import json
import os
import resource
import select
import signal
import sys

from .child import Child, end_child, start_child, warm_up
from .confinement import Confinement
from .frames import forward_frame, read_frame, write_frame
from .output import TOO_LONG, Output, address_space

TYPE_CHECKING = False
if TYPE_CHECKING:  # an import of `typing` would cost each child time
    from typing import Any

# Children that wait for a program, and those that wait for their end, each with about 1 MiB of its own. One whose
# address space has grown by more than this does not wait.
_MAX_AHEAD, _MAX_KEPT_BYTES = 64, 2 << 20
# without a request, before children are started and ended
_IDLE_S = 0.005


class Server:
    """Answers requests with children that are started before, and ended after, they are needed.

    Args:
        seconds, memory_mb: Limits of a child; see `Confinement`.
        wall_seconds: Longest time of a program.
        waiting_seconds: Longest time that it waits; see `Output`.
        max_output: Longest result in bytes.

    Raises:
        OSError: The machine is unknown.
    """

    def __init__(
        self,
        *,
        seconds: int,
        memory_mb: int,
        wall_seconds: float,
        waiting_seconds: float,
        max_output: int,
    ) -> None:
        self.confinement = Confinement(seconds=seconds, memory_mb=memory_mb)
        self.limits: dict[str, Any] = {
            "seconds": wall_seconds,
            "waiting_seconds": waiting_seconds,
            "max_bytes": max_output,
        }
        self.small = address_space(os.getpid()) + _MAX_KEPT_BYTES
        self.ahead: collections.deque[Child] = collections.deque()
        self.answered: collections.deque[Child] = collections.deque()
        self.wanted = 1

    def serve(self) -> None:
        """Answer requests until standard input ends. Does not return."""
        try:
            while True:
                self._prepare()
                select.select([0], [], [])
                for reply in self._run(self._take()):
                    write_frame(1, reply)
        finally:
            for child in (*self.ahead, *self.answered):
                end_child(child)

    def _prepare(self) -> None:
        """End and start children until a request comes or nothing is left to do."""
        wait_s = _IDLE_S
        while self.answered or len(self.ahead) < self.wanted:
            if select.select([0], [], [], wait_s)[0]:
                return
            wait_s = 0.0
            if self.answered:
                end_child(self.answered.popleft())
                continue
            try:
                self.ahead.append(start_child(self.confinement))
            except OSError:
                # as many as there is room for
                self.wanted = len(self.ahead)

    def _take(self) -> Child:
        """Return a child that waits for its program."""
        while self.ahead:
            child = self.ahead.popleft()
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            # one that could not confine itself has said so; others may have been killed for lack of memory
            if ended is None or ended.si_code == os.CLD_EXITED:
                return child
            end_child(child)
        self.wanted = min(max(1, 2 * self.wanted), _MAX_AHEAD)
        try:
            return start_child(self.confinement)
        except OSError:
            while self.answered:
                end_child(self.answered.popleft())
            return start_child(self.confinement)

    def _run(self, child: Child) -> list[bytes]:
        """Return the results of the next program, or the reason that there are none. Its child ends, now or later."""
        output = Output(child, **self.limits)
        replies = []
        for _ in range(2):
            forward_frame(0, child.request)
            replies.append(b"" if output.ended else output.line())
        if not output.ended and len(self.answered) < _MAX_AHEAD:
            # It computes no more and gets no memory; one that has much of it does not wait for its end.
            os.kill(child.pid, signal.SIGSTOP)
            resource.prlimit(child.pid, resource.RLIMIT_AS, (0, 0))
            if address_space(child.pid) <= self.small:
                self.answered.append(child)
                return replies
        is_killed = end_child(child) == signal.SIGKILL
        return [reply or TOO_LONG if is_killed else reply for reply in replies]


def refuse(reason: str) -> None:
    """Answer requests with the reason why programs cannot be confined. Does not return."""
    while True:
        for reply in (json.dumps({"starts": False, "error": reason}).encode(), b""):
            read_frame(0)
            write_frame(1, reply)


def main() -> None:
    """Answer requests until standard input ends, with the limits that the last argument has as JSON."""
    try:
        server = Server(**json.loads(sys.argv.pop()))
    except OSError as error:
        refuse(str(error))
    os.environ.clear()
    warm_up()
    gc.collect()
    gc.freeze()
    server.serve()
