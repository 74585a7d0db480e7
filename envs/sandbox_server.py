"""Server of the sandbox: runs each program in a child process that the kernel lets do nothing but compute.

It is a script of its own, run by an isolated interpreter (`python -I -S`) that imports nothing of this package.
Requests and replies are frames on standard input and output: four bytes of length, then JSON.

A child gives up every system call but those that allocate memory, read the clock, write to open descriptors and end it
(seccomp). It has three null descriptors and one for its result, so it can open no file or socket, start no process or
thread and send no signal. Modules are imported before. CPU time, memory and the length of the result are limited.
"""

from __future__ import annotations

import bisect  # noqa: F401 (programs may import what is imported here)
import collections  # noqa: F401
import ctypes
import functools  # noqa: F401
import gc
import heapq  # noqa: F401
import itertools  # noqa: F401
import json
import math  # noqa: F401
import operator  # noqa: F401
import os
import platform
import random  # noqa: F401
import re  # noqa: F401
import resource
import select
import signal
import string  # noqa: F401
import struct
import sys
import time
from typing import Any

_RESULT = 3
_MIB = 1 << 20
_PLAIN = (bool, int, float, str, type(None))
_MAX_ERROR = 200
_TOO_LONG = b'{"starts": true, "error": "takes too long"}'
_TOO_MUCH = b'{"starts": true, "error": "output is too long"}'

# audit architecture of each machine, and the numbers of the permitted calls: read, write, close, fstat, lseek, mmap,
# mprotect, munmap, brk, rt_sigaction, rt_sigprocmask, rt_sigreturn, mremap, madvise, exit, sigaltstack, futex,
# clock_gettime, exit_group, getrandom
_MACHINES = {
    "x86_64": (
        0xC000003E,
        (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 25, 28, 60, 131, 202, 228, 231, 318),
    ),
    "aarch64": (
        0xC00000B7,
        (
            63,
            64,
            57,
            80,
            62,
            222,
            226,
            215,
            214,
            134,
            135,
            139,
            216,
            233,
            93,
            132,
            98,
            113,
            94,
            278,
        ),
    ),
}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_MODE_FILTER = 2
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
# instructions of the filter: load a word of the call, jump if equal, return
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _ARCHITECTURE = 0, 4


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse_system_calls() -> None:
    """Give up all system calls but those of `_MACHINES`; the others fail with EPERM from now on.

    Raises:
        OSError: The kernel or the machine has no such filter.
    """
    known = _MACHINES.get(platform.machine())
    if sys.platform != "linux" or known is None:
        raise OSError("expected Linux on x86_64 or aarch64")
    architecture, permitted = known
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
    ]
    lines.append((_LOAD, 0, 0, _NUMBER))
    for number in permitted:
        lines += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    lines.append((_RETURN, 0, 0, _REFUSE))
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    control = ctypes.CDLL(None, use_errno=True).prctl
    program = _Filter(len(lines), code)
    if control(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or control(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp")


def run_child(request: dict[str, Any], descriptor: int) -> None:
    """Run a program in this process and write its results to a descriptor. Does not return."""
    try:
        _confine(request, descriptor)
        _write(_results(request))
    except BaseException as error:
        _write({"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR], "starts": False})
    finally:
        os._exit(0)


def _confine(request: dict[str, Any], descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    # The result's descriptor may be one of those that are overwritten.
    result = os.dup2(descriptor, 100)
    for number in range(_RESULT):
        os.dup2(null, number)
    os.dup2(result, _RESULT)
    os.closerange(_RESULT + 1, 4096)
    sys.stdin = sys.stdout = sys.stderr = open(1, "w", closefd=False)  # noqa: SIM115 (the program's)
    os.environ.clear()
    limits = {
        resource.RLIMIT_CPU: request["seconds"],
        resource.RLIMIT_AS: request["memory_mb"] * _MIB,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    refuse_system_calls()


def _results(request: dict[str, Any]) -> dict[str, Any]:
    """Return the value or the error of each call; and whether the program starts, with the error if not."""
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(request["program"], "program", "exec"), space)
    function = space[request["name"]]
    return {"starts": True, "calls": [_call(function, value) for value in request["inputs"]]}


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


def _write(answer: dict[str, Any]) -> None:
    text = json.dumps(answer).encode()
    while text:
        text = text[os.write(_RESULT, text) :]


def run(request: dict[str, Any]) -> bytes:
    """Run a program in a child and return what it wrote as its result, or why there is none."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        run_child(request, writer)
    os.close(writer)
    try:
        reply = _read(reader, request)
    finally:
        os.close(reader)
        # One that has ended by itself is a zombie, which no signal changes.
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if not reply and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return _TOO_LONG
    return reply


def _read(reader: int, request: dict[str, Any]) -> bytes:
    end, text = time.monotonic() + request["wall_seconds"], b""
    while True:
        if not select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
            return _TOO_LONG
        part = os.read(reader, 1 << 16)
        if not part:
            return text
        text += part
        if len(text) > request["max_output"]:
            return _TOO_MUCH


def _read_exactly(count: int) -> bytes:
    text = b""
    while len(text) < count:
        part = os.read(0, count - len(text))
        if not part:
            raise SystemExit
        text += part
    return text


def main() -> None:
    """Answer requests until standard input ends."""
    gc.freeze()
    while True:
        (length,) = struct.unpack("!I", _read_exactly(4))
        reply = run(json.loads(_read_exactly(length)))
        frame = struct.pack("!I", len(reply)) + reply
        while frame:
            frame = frame[os.write(1, frame) :]


if __name__ == "__main__":
    main()
