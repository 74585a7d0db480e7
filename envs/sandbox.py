"""Runs a player's programs in another process without files, network, processes or more than a second of CPU time.

`sandbox_server` says how. Neither expected results nor anything else worth reading is in that process.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SERVER = Path(__file__).with_name("sandbox_server.py")
SECONDS, WALL_SECONDS, MEMORY_MB, MAX_OUTPUT = 1, 5, 256, 20_000
# for the server itself, beyond the time of a program
_GRACE = 10.0


@dataclass(frozen=True, slots=True)
class Run:
    """Outcome of a program.

    Attributes:
        starts: whether it could be compiled, ran to its end and defined the function.
        calls: `{"value": …}` or `{"error": …}` of each call; empty if there is an error.
        error: why there are no calls.
    """

    starts: bool
    calls: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""


class Sandbox:
    """A server process, started at the first program and again when it has died. Threads take turns.

    Pickled and copied sandboxes start servers of their own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def run(self, program: str, *, name: str, inputs: Sequence[Any]) -> Run:
        """Run a program and call its function `name` with each input, a plain value.

        Raises:
            RuntimeError: Programs cannot be confined on this machine.
        """
        request = {
            "program": program,
            "name": name,
            "inputs": list(inputs),
            "seconds": SECONDS,
            "wall_seconds": WALL_SECONDS,
            "memory_mb": MEMORY_MB,
            "max_output": MAX_OUTPUT,
        }
        with self._lock:
            reply = self._ask(json.dumps(request).encode())
        return _outcome(reply, count=len(inputs))

    def close(self) -> None:
        """End the server."""
        server, self._server = self._server, None
        if server is not None and self._owner == os.getpid():
            server.kill()
            server.communicate()

    def _ask(self, request: bytes) -> bytes:
        server = self._running()
        assert server.stdin is not None and server.stdout is not None
        try:
            server.stdin.write(struct.pack("!I", len(request)) + request)
            server.stdin.flush()
            end = time.monotonic() + WALL_SECONDS + _GRACE
            (length,) = struct.unpack("!I", _read(server.stdout.fileno(), 4, end=end))
            return _read(server.stdout.fileno(), length, end=end)
        except (OSError, EOFError) as error:
            self.close()
            raise RuntimeError(f"the sandbox's server has died: {error}") from error

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the server of this process; a forked process needs one of its own."""
        if self._server is None or self._owner != os.getpid():
            self._server = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(_SERVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
            )
            self._owner = os.getpid()
            atexit.register(self.close)
        return self._server


SANDBOX = Sandbox()
"""The sandbox that all environments of a process share."""


def check_sandbox() -> None:
    """Check that programs can be confined here.

    Raises:
        RuntimeError: The kernel has no seccomp, or the machine is unknown.
    """
    run = SANDBOX.run("def f(x):\n return open('/dev/null') and 1", name="f", inputs=[0])
    if not run.starts:
        raise RuntimeError(
            f"programs cannot be confined here: {run.error}; run on Linux with seccomp"
        )
    if run.calls and "PermissionError" in run.calls[0].get("error", ""):
        return
    raise RuntimeError(f"programs are not confined: found {run}; run on Linux with seccomp")


def _read(descriptor: int, count: int, *, end: float) -> bytes:
    text = b""
    while len(text) < count:
        if not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
            raise EOFError("no answer")
        part = os.read(descriptor, count - len(text))
        if not part:
            raise EOFError("end of output")
        text += part
    return text


def _outcome(reply: bytes, *, count: int) -> Run:
    """Return a run from what the child wrote, which the program may have forged."""
    if not reply:
        return Run(starts=True, error="ended early")
    try:
        answer = json.loads(reply)
    except (ValueError, RecursionError):
        return Run(starts=True, error="output is unreadable")
    if not isinstance(answer, dict):
        return Run(starts=True, error="output is unreadable")
    calls = answer.get("calls")
    if isinstance(calls, list) and len(calls) == count and all(isinstance(c, dict) for c in calls):
        return Run(starts=True, calls=calls)
    return Run(starts=bool(answer.get("starts")), error=str(answer.get("error"))[:200])
