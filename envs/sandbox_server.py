"""Server of the sandbox: runs each program in a child process that the kernel lets do nothing but compute.

It is a script of its own, run by an interpreter (`python -P -s -S`) that imports nothing of this package. Its argument
is a JSON object of limits. Requests and replies are pairs of frames on standard input and output: four bytes of length,
then JSON. The first frame of a request has the program and its inputs, the second one hidden inputs. They enter the
child when the results of the first ones have left it.

A child gives up every system call but those that allocate memory, read the clock, read and write open descriptors and
end it (seccomp), and all capabilities. It has three null descriptors, one for its request and one for its result, so it
can open no file or socket, start no process or thread and send no signal. Modules are imported before. CPU time, time
spent waiting, memory and the length of the result are limited. No program is ever in the memory of the server, from
which the next ones are forked.

Most of a program's time is the start and the end of its child. Both are done while no request waits: children are
started ahead, twice as many whenever there were too few, and those that have answered are stopped until they are ended.
Each runs one program.
"""

from __future__ import annotations

import bisect  # noqa: F401 (programs may import what is imported here)
import collections
import ctypes
import fcntl
import functools  # noqa: F401
import gc
import heapq  # noqa: F401
import itertools  # noqa: F401
import json
import math  # noqa: F401
import operator  # noqa: F401
import os
import platform
import random
import re  # noqa: F401
import resource
import select
import signal
import string  # noqa: F401
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # an import of `typing` would cost each child time
    from typing import Any

Child = collections.namedtuple("Child", ("pid", "request", "result"))
"""A process that waits for its program, and the descriptors to write the request to and to read the result from."""

_RESULT, _REQUEST = 3, 4
_MIB = 1 << 20
# Children that wait for a program, and those that wait for their end, each with about 1 MiB of its own. One whose
# address space has grown by more than this does not wait.
_MOST_AHEAD, _MAX_KEPT_MB = 64, 2
# without a request, before children are started and ended
_IDLE_S = 0.005
# between two looks at a child that has not answered
_LOOK_S = 0.05
_PLAIN = (bool, int, float, str, type(None))
_MAX_ERROR = 200
# a request for a program with much of what the player's programs do
_FIRST = json.dumps(
    {
        "program": "import math\ndef f(x):\n y = [n * 2 for n in sorted(x)]\n return str(max(y, default=0)).upper()",
        "name": "f",
        "inputs": [[3, 1, 2]] * 10,
    }
)
_TOO_LONG = b'{"starts": true, "error": "takes too long"}'
_TOO_MUCH = b'{"starts": true, "error": "output is too long"}'

# audit architecture of each machine, the number of madvise, and those of the permitted calls: read, write, close,
# fstat, lseek, mmap, mprotect, munmap, brk, rt_sigaction, rt_sigprocmask, rt_sigreturn, mremap, exit, sigaltstack,
# futex, clock_gettime, exit_group, getrandom
_MACHINES = {
    "x86_64": (
        0xC000003E,
        28,
        (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 25, 60, 131, 202, 228, 231, 318),
    ),
    "aarch64": (
        0xC00000B7,
        233,
        (63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 216, 93, 132, 98, 113, 94, 278),
    ),
}
# permitted advice about memory: normal, random, sequential, will need, don't need, free, huge pages, no huge pages
_ADVICE = (0, 1, 2, 3, 4, 8, 14, 15)
# of capset: version 3 of its structures, this process, and no capabilities
_CAPABILITIES_OF, _NO_CAPABILITIES = struct.pack("Ii", 0x20080522, 0), bytes(24)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_MODE_FILTER = 2
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
# instructions of the filter: load a word of the call, jump if equal, return
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _ARCHITECTURE, _THIRD_ARGUMENT = 0, 4, 32


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def seccomp_filter() -> _Filter:
    """Return the filter that refuses all system calls but those of `_MACHINES`, and other advice than `_ADVICE`.

    What is refused fails with EPERM.

    Raises:
        OSError: The machine is unknown.
    """
    known = _MACHINES.get(platform.machine())
    if sys.platform != "linux" or known is None:
        raise OSError("expected Linux on x86_64 or aarch64")
    architecture, madvise, permitted = known
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
    ]
    lines.append((_LOAD, 0, 0, _NUMBER))
    for number in permitted:
        lines += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    lines += [(_JUMP_EQUAL, 1, 0, madvise), (_RETURN, 0, 0, _REFUSE)]
    lines.append((_LOAD, 0, 0, _THIRD_ARGUMENT))
    for advice in _ADVICE:
        lines += [(_JUMP_EQUAL, 0, 1, advice), (_RETURN, 0, 0, _ALLOW)]
    lines.append((_RETURN, 0, 0, _REFUSE))
    return _Filter(len(lines), b"".join(struct.pack("HBBI", *line) for line in lines))


class Confinement:
    """What a child does to itself before it takes a program, prepared so that little is left to do in the child.

    Args:
        seconds: CPU time of a child.
        memory_mb: memory that it may allocate in MiB.

    Raises:
        OSError: The machine is unknown.
    """

    def __init__(self, *, seconds: int, memory_mb: int) -> None:
        self.limits = {
            resource.RLIMIT_CPU: seconds,
            resource.RLIMIT_AS: memory_mb * _MIB,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NPROC: 0,
        }
        self.filter = seccomp_filter()
        library = ctypes.CDLL(None, use_errno=True)
        self.control, self.set_capabilities = library.prctl, library.capset
        self.null = os.open(os.devnull, os.O_RDWR)
        self.output = open(1, "w", closefd=False)  # noqa: SIM115 (the program's)

    def enter(self, request: int, result: int) -> None:
        """Confine this process. Descriptors become `_REQUEST` and `_RESULT`.

        Raises:
            OSError: The kernel has no seccomp.
        """
        first = _RESULT
        for descriptor in sorted((self.null, request, result)):
            os.closerange(first, descriptor)
            first = descriptor + 1
        os.closerange(first, 4096)
        # They may be among those that are overwritten.
        null, result, request = (
            fcntl.fcntl(descriptor, fcntl.F_DUPFD, _REQUEST + 1)
            for descriptor in (self.null, result, request)
        )
        for number in range(_RESULT):
            os.dup2(null, number)
        os.dup2(result, _RESULT)
        os.dup2(request, _REQUEST)
        os.closerange(_REQUEST + 1, 4096)
        sys.stdin = sys.stdout = sys.stderr = self.output
        for limit, value in self.limits.items():
            resource.setrlimit(limit, (value, value))
        if (
            self.set_capabilities(_CAPABILITIES_OF, _NO_CAPABILITIES)
            or self.control(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            or self.control(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            or self.control(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(self.filter), 0, 0)
        ):
            raise OSError(ctypes.get_errno(), "seccomp or capset")


def start_child(confinement: Confinement) -> Child:
    """Start a process that confines itself and waits for a request.

    Raises:
        OSError: There are too many processes or open descriptors.
    """
    descriptors = list(os.pipe())
    try:
        descriptors += os.pipe()
        pid = os.fork()
    except OSError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    request_reader, request_writer, result_reader, result_writer = descriptors
    if pid == 0:
        run_child(confinement, request_reader, result_writer)
    os.close(request_reader)
    os.close(result_writer)
    return Child(pid, request_writer, result_reader)


def run_child(confinement: Confinement, request: int, result: int) -> None:
    """Run a program in this process and write its results to a descriptor. Does not return."""
    try:
        confinement.enter(request, result)
        # `random` takes a seed of its own after a fork; a program's results are the same in all children
        random.seed(0)
        # takes what memory the first request to a process takes
        _results(*_defined(_FIRST))
        function, inputs = _defined(read_frame(_REQUEST))
        _write(_results(function, inputs))
        _write(_results(function, json.loads(read_frame(_REQUEST))))
        # The end of a process takes time; that of this one comes when nothing else is to do.
        os.read(_REQUEST, 1)
    except BaseException as error:
        failure = {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR], "starts": False}
        _write(json.dumps(failure).encode())
    finally:
        os._exit(0)


def _defined(text: str | bytes) -> tuple[Any, list[Any]]:
    """Return the function that the program of a request defines, and the inputs.

    Raises:
        BaseException: The program does not start, or ends this process.
    """
    request = json.loads(text)
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(request["program"], "program", "exec"), space)
    return space[request["name"]], request["inputs"]


def _results(function: Any, inputs: list[Any]) -> bytes:
    """Return the value or the error of each call."""
    return json.dumps([_call(function, value) for value in inputs]).encode()


def _call(function: Any, value: Any) -> dict[str, Any]:
    try:
        result = function(value)
        if not _is_plain(result):
            return {"error": f"returned a {type(result).__name__}"}
        return {"value": result}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR]}


def _is_plain(value: Any) -> bool:
    if type(value) is list:
        return all(type(item) in _PLAIN for item in value)
    return type(value) in _PLAIN


def _write(text: bytes) -> None:
    line = text + b"\n"
    while line:
        line = line[os.write(_RESULT, line) :]


def end_child(child: Child) -> int:
    """End a child and return the signal that ended it, or 0."""
    os.close(child.request)
    os.close(child.result)
    # One that has ended by itself is a zombie, which no signal changes.
    os.kill(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


class Output:
    """The lines that a child writes.

    Args:
        child: The process.
        seconds: Longest time until the last line.
        waiting_seconds: Longest time that the process may wait for something. It can only wait for what never comes,
            such as a lock: it has no threads, and its request is there.
        most: Largest number of bytes.
    """

    def __init__(self, child: Child, *, seconds: float, waiting_seconds: float, most: int) -> None:
        self.child, self.left = child, most
        self.end = time.monotonic() + seconds
        self.looks = round(waiting_seconds / _LOOK_S)
        self.text, self.ended = b"", False

    def line(self) -> bytes:
        """Return the next line; where none comes, and none will, what there is of it or why not."""
        while b"\n" not in self.text:
            part = os.read(self.child.result, 1 << 16) if self._comes() else None
            self.left -= len(part or b"")
            if not part or self.left < 0:
                self.ended = True
                return self.text if part == b"" else _TOO_MUCH if part else _TOO_LONG
            self.text += part
        line, _, self.text = self.text.partition(b"\n")
        return line

    def _comes(self) -> bool:
        """Wait for something to read; return False where it takes too long."""
        while not select.select([self.child.result], [], [], _LOOK_S)[0]:
            # whether it waits does not depend on what else the machine does
            self.looks -= state(self.child.pid) == "S"
            if self.looks <= 0 or time.monotonic() > self.end:
                return False
        return True


def state(pid: int) -> str:
    """Return the letter of a process's state: S of one that waits, R of one that computes or would."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as values:
        return values.read().rpartition(")")[2].split()[0]


def forward_frame(source: int, target: int) -> None:
    """Move a frame from one pipe to another without reading it; drop it if nobody reads the other.

    Raises:
        SystemExit: The other end of the source has been closed.
    """
    header = _read_exactly(source, 4)
    (left,) = struct.unpack("!I", header)
    try:
        os.write(target, header)
        while left:
            moved = os.splice(source, target, left)
            if not moved:
                raise SystemExit
            left -= moved
    except BrokenPipeError:
        _read_exactly(source, left)


def read_frame(descriptor: int) -> bytes:
    """Read a frame.

    Raises:
        SystemExit: The other end has been closed.
    """
    (length,) = struct.unpack("!I", _read_exactly(descriptor, 4))
    return _read_exactly(descriptor, length)


def _read_exactly(descriptor: int, count: int) -> bytes:
    text = b""
    while len(text) < count:
        part = os.read(descriptor, count - len(text))
        if not part:
            raise SystemExit
        text += part
    return text


def write_frame(descriptor: int, text: bytes) -> None:
    """Write a frame."""
    frame = struct.pack("!I", len(text)) + text
    while frame:
        frame = frame[os.write(descriptor, frame) :]


def address_space(pid: int) -> int:
    """Return the address space of a process in bytes; 0 of a zombie."""
    with open(f"/proc/{pid}/statm") as sizes:
        return int(sizes.read().split()[0]) * resource.getpagesize()


class Server:
    """Answers requests with children that are started before, and ended after, they are needed.

    Args:
        seconds, memory_mb: limits of a child; see `Confinement`.
        wall_seconds: longest time of a program.
        waiting_seconds: longest time that it waits; see `Output`.
        max_output: longest result in bytes.

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
            "most": max_output,
        }
        self.small = address_space(os.getpid()) + _MAX_KEPT_MB * _MIB
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
        self.wanted = min(max(1, 2 * self.wanted), _MOST_AHEAD)
        try:
            return start_child(self.confinement)
        except OSError:
            while self.answered:
                end_child(self.answered.popleft())
            return start_child(self.confinement)

    def _run(self, child: Child) -> list[bytes]:
        """Return what the next program writes as its results, or why there are none. Its child ends, now or later."""
        output = Output(child, **self.limits)
        replies = []
        for _ in range(2):
            forward_frame(0, child.request)
            replies.append(b"" if output.ended else output.line())
        if not output.ended and len(self.answered) < _MOST_AHEAD:
            # It computes no more and gets no memory; one that has much of it does not wait for its end.
            os.kill(child.pid, signal.SIGSTOP)
            resource.prlimit(child.pid, resource.RLIMIT_AS, (0, 0))
            if address_space(child.pid) <= self.small:
                self.answered.append(child)
                return replies
        is_killed = end_child(child) == signal.SIGKILL
        return [reply or _TOO_LONG if is_killed else reply for reply in replies]


def refuse(reason: str) -> None:
    """Answer requests with the reason why programs cannot be confined. Does not return."""
    while True:
        for reply in (json.dumps({"starts": False, "error": reason}).encode(), b""):
            read_frame(0)
            write_frame(1, reply)


def main() -> None:
    """Answer requests until standard input ends."""
    try:
        server = Server(**json.loads(sys.argv.pop()))
    except OSError as error:
        refuse(str(error))
    os.environ.clear()
    # Children find in memory what the first program of a process makes.
    _results(*_defined(_FIRST))
    gc.collect()
    gc.freeze()
    server.serve()


if __name__ == "__main__":
    main()
