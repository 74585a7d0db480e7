"""Process that starts agent programs and ends them with all their children. Run as a script; standard library only.

`python supervisor.py [MODULE.FUNCTION]` gets connections over the socket that is its standard input. A connection is
one program: the owner sends one line of JSON, `{"command", "environment", "folder", "memory_mb", "file_mb", "disk_mb",
"output_bytes"}`, and gets one line back when the program has ended, `{"code", "signal", "disk_exceeded", "output"}`.
Where the owner closes its side, the program is killed. The supervisor ends when its standard input is closed, and its
programs end with it.

    supervisor ──► keeper, one a connection ──► program and all that it starts

A keeper adopts what the program leaves behind, so that nothing outlives it. Where the program kills its keeper, the
supervisor adopts what is left and kills it; where it kills the supervisor, its keeper kills it. A program that kills
both is killed by the kernel, and what it has started by the owner (`ragen_pl.agent_programs.running`). A function is
imported once and runs in a fork.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ragen_pl.base.error_text import exit_code

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_MIB = 1024 * 1024
# time for the children of a program to die
_KILL_S = 5.0
# output that is read after the program's end
_REST_BYTES = 1 << 20
# least time between two looks at the size of a program's files, also as a multiple of a look's time
_LOOK_S, _LOOK_FACTOR = 0.5, 100
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Start a keeper for each connection."""
    owner = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    function, problem = _function(sys.argv[1]) if len(sys.argv) > 1 else (None, None)
    _LIBC.prctl(_SET_CHILD_SUBREAPER, 1)
    ended, caught = os.pipe()
    for end in (ended, caught):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(caught, warn_on_full_buffer=False)
    # a module may start processes when it is imported
    kept = set(_children())
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([owner.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 1 << 12)
            kept -= _reaped()
            for orphan in set(_children()) - kept:
                _kill(orphan)
        if owner.fileno() not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(owner, 1, 1)
        if not data:
            return
        connection = socket.socket(fileno=descriptors[0])
        supervisor = os.getpid()
        keeper = os.fork()
        if keeper == 0:
            signal.set_wakeup_fd(-1)
            for descriptor in (owner.fileno(), ended, caught):
                os.close(descriptor)
            _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
            code = 1
            try:
                code = _keep(connection, function, problem, supervisor)
            finally:
                os._exit(code)
        kept.add(keeper)
        connection.close()


def _function(name: str) -> tuple[Callable[..., Any] | None, str | None]:
    """Return a function by its import path, and why there is none."""
    module, _, attribute = name.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), attribute)
    # any error of the user's module
    except BaseException:
        return None, traceback.format_exc()
    return function, None


def _keep(
    connection: socket.socket,
    function: Callable[..., Any] | None,
    problem: str | None,
    supervisor: int,
) -> int:
    """Run a program, wait for its end or the owner's, and tell how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _LIBC.prctl(_SET_CHILD_SUBREAPER, 1)
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(1 << 20)
        if not part:
            return 0
        line += part
    order = json.loads(line)
    if problem is not None:
        _tell(connection, {"code": 1, "signal": None, "output": problem})
        return 0
    output, written = os.pipe()
    keeper = os.getpid()
    program = os.fork()
    if program == 0:
        connection.close()
        os.close(output)
        _run(order, function, written, keeper)
    os.close(written)
    ended, caught = os.pipe()
    os.set_blocking(caught, False)
    signal.signal(signal.SIGTERM, lambda *_: os.write(caught, b"t"))
    # the supervisor may have ended before the signal was asked for
    if os.getppid() != supervisor:
        os.write(caught, b"t")
    tail = bytearray()
    limit = int(order["output_bytes"])
    handle = os.pidfd_open(program)
    waited = [output, connection.fileno(), handle, ended]
    disk = _Disk(order["folder"], order["disk_mb"])
    exceeded = False
    while True:
        ready, _, _ = select.select(waited, [], [], disk.wait_s())
        exceeded = disk.is_exceeded()
        if exceeded:
            os.kill(program, signal.SIGKILL)
            break
        if output in ready:
            part = os.read(output, 1 << 16)
            tail = (tail + part)[-limit:]
            if not part:
                waited.remove(output)
        if handle in ready:
            break
        if connection.fileno() in ready or ended in ready:
            os.kill(program, signal.SIGKILL)
            break
    _, status = os.waitpid(program, 0)
    _kill_children()
    if output in waited:
        tail = (tail + _rest(output))[-limit:]
    signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    text = tail.decode(errors="replace")
    outcome = {"code": code, "signal": signalled, "disk_exceeded": exceeded, "output": text}
    _tell(connection, outcome)
    return 0


class _Disk:
    """Size of the files in a folder, which is looked at from time to time: it takes no rights, as a quota would.

    Args:
        folder: The folder.
        limit_mb: Largest size in MiB; None for no limit.
    """

    def __init__(self, folder: str, limit_mb: int | None) -> None:
        self._folder = folder
        self._limit = None if limit_mb is None else limit_mb * _MIB
        self._next = time.monotonic() + _LOOK_S

    def wait_s(self) -> float | None:
        """Return the seconds until the next look, None where there is no limit."""
        return None if self._limit is None else max(0.0, self._next - time.monotonic())

    def is_exceeded(self) -> bool:
        """Look where it is time to, and return whether the limit is exceeded."""
        begin = time.monotonic()
        if self._limit is None or begin < self._next:
            return False
        size = _disk_bytes(self._folder)
        end = time.monotonic()
        self._next = end + max(_LOOK_S, _LOOK_FACTOR * (end - begin))
        return size > self._limit


def _disk_bytes(folder: str) -> int:
    """Return the bytes on the disk of a folder's files, while a program changes them."""
    total, folders = 0, [folder]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    total += 512 * entry.stat(follow_symlinks=False).st_blocks
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
    return total


def _run(
    order: dict[str, Any], function: Callable[..., Any] | None, written: int, keeper: int
) -> None:
    """Become the program. Never returns."""
    code = 127
    try:
        os.setsid()
        # it is kept by what it becomes
        _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != keeper:
            os.kill(os.getpid(), signal.SIGKILL)
        # Python ignores it, and a program would inherit that
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, written), (2, written)):
            os.dup2(source, target)
        os.closerange(3, 1 << 16)
        for limit, amount in (
            (resource.RLIMIT_AS, order["memory_mb"]),
            (resource.RLIMIT_FSIZE, order["file_mb"]),
        ):
            if amount is not None:
                resource.setrlimit(limit, (amount * _MIB, amount * _MIB))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(order["folder"])
        if order["command"] is not None:
            os.execvpe(order["command"][0], order["command"], order["environment"])
        os.environ.clear()
        os.environ.update(order["environment"])
        assert function is not None
        _call(function)
        code = 0
    # any error of the program, its exits too
    except SystemExit as error:
        code = exit_code(error)
    except BaseException:
        traceback.print_exc()
        code = 1 if order["command"] is None else 127
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _call(function: Callable[..., Any]) -> None:
    """Call a function with its task, and write what it returns as the result."""
    with open(os.environ["RAGEN_TASK_FILE"]) as file:
        task = json.load(file)
    result = function(task)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    if result is not None:
        with open(os.environ["RAGEN_RESULT"], "w") as file:
            json.dump(result, file)


async def _awaited(result: Any) -> Any:
    return await result


def _children() -> list[int]:
    """Return the children of this process, those that it has adopted included."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(child) for child in file.read().split()]


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _reaped() -> set[int]:
    """Return the children that have ended, and release them."""
    reaped = set()
    with suppress(ChildProcessError):
        while child := os.waitpid(-1, os.WNOHANG)[0]:
            reaped.add(child)
    return reaped


def _kill_children() -> None:
    """Kill all children, those that are adopted meanwhile too."""
    end = time.monotonic() + _KILL_S
    while (children := _children()) and time.monotonic() < end:
        for child in children:
            _kill(child)
        _reaped()
        time.sleep(0.001)


def _rest(output: int) -> bytes:
    """Return the rest of the output."""
    os.set_blocking(output, False)
    rest = b""
    with suppress(BlockingIOError):
        while len(rest) < _REST_BYTES and (part := os.read(output, 1 << 16)):
            rest += part
    return rest


def _tell(connection: socket.socket, outcome: dict[str, Any]) -> None:
    with suppress(OSError):
        connection.sendall(json.dumps(outcome).encode() + b"\n")
        connection.close()


if __name__ == "__main__":
    main()
