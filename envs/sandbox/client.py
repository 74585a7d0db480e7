"""Runs a player's programs in another process without files, network, processes or more than a second of CPU time.

`envs.sandbox.server` says how. Neither expected results nor anything else worth reading is in that process. Hidden
inputs enter it when nothing that it writes is shown any more.
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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# `-m` would import more, which each child would have in memory
_PROGRAM = "from server.serving import main; main()"
SECONDS, WALL_SECONDS, MEMORY_MB, MAX_OUTPUT = 1, 5, 256, 20_000
WAITING_SECONDS = 1
"""Longest time that a program waits, such as for a lock, which does not count as CPU time."""
ENDINGS = ("takes too long", "output is too long", "output is unreadable", "ended early")
"""Errors of a program that tell nothing of what it has computed."""
# for the server itself, beyond the time of a program
_GRACE = 10.0


@dataclass(frozen=True, slots=True)
class Run:
    """Outcome of a program.

    Attributes:
        starts: Whether it could be compiled, ran to its end and defined the function.
        calls: `{"value": …}` or `{"error": …}` of each call; empty if there is an error.
        error: Why there are no calls.
        hidden: Outcome of the calls with hidden inputs. The program may have put the inputs anywhere in it but for the
            `ENDINGS`.
    """

    starts: bool
    calls: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    hidden: Run | None = None


class Sandbox:
    """Server processes, one for each thread that runs a program at the same time.

    They are started as they are needed. Pickled and copied sandboxes start servers of their own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[ServerProcess] = []

    def __reduce__(self) -> tuple[type[Sandbox], tuple[()]]:
        return Sandbox, ()

    def run(
        self, program: str, *, name: str, inputs: Sequence[Any], hidden: Sequence[Any] = ()
    ) -> Run:
        """Run a program and call its function `name` with each input, a plain value.

        Args:
            program: The program.
            name: The function.
            inputs: Inputs that the policy knows.
            hidden: Inputs of later calls in the same process. They are not there before the results of the first ones
                have left it.

        Raises:
            RuntimeError: The server has died.
        """
        request = {"program": program, "name": name, "inputs": list(inputs)}
        server = self._take()
        first, second = server.ask(json.dumps(request).encode(), json.dumps(list(hidden)).encode())
        with self._lock:
            self._idle.append(server)
        run = _outcome(first, count=len(inputs))
        return run if run.error else replace(run, hidden=_outcome(second, count=len(hidden)))

    @property
    def idle(self) -> tuple[ServerProcess, ...]:
        """Servers that run no program, the one that is used next at the end."""
        with self._lock:
            return tuple(self._idle)

    def close(self) -> None:
        """End the servers that run no program."""
        with self._lock:
            servers, self._idle = self._idle, []
        for server in servers:
            server.close()

    def _take(self) -> ServerProcess:
        """Return an idle server that lives and was started by this process, or a new one."""
        with self._lock:
            self._idle = [server for server in self._idle if server.serves()]
            if self._idle:
                return self._idle.pop()
        return ServerProcess()


class ServerProcess:
    """A process of `envs.sandbox.server`."""

    def __init__(self) -> None:
        limits = {
            "seconds": SECONDS,
            "wall_seconds": WALL_SECONDS,
            "waiting_seconds": WAITING_SECONDS,
            "memory_mb": MEMORY_MB,
            "max_output": MAX_OUTPUT,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-B", "-c", _PROGRAM, json.dumps(limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # the order of a set is the same in every process
            env={"PYTHONHASHSEED": "0", "PYTHONPATH": str(Path(__file__).parent)},
            cwd="/",
        )
        self.owner = os.getpid()
        atexit.register(self.close)

    def ask(self, *frames: bytes) -> list[bytes]:
        """Send the frames of a request and return the reply to each.

        Raises:
            RuntimeError: The server has died.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        replies = self.process.stdout.fileno()
        try:
            for frame in frames:
                self.process.stdin.write(struct.pack("!I", len(frame)) + frame)
            self.process.stdin.flush()
            end = time.monotonic() + WALL_SECONDS + _GRACE
            return [_read_frame(replies, end=end) for _ in frames]
        except (OSError, EOFError) as error:
            self.close()
            raise RuntimeError(f"the sandbox's server has died: {error}") from error
        except BaseException:
            self.close()
            raise

    def serves(self) -> bool:
        """Return whether it serves this process."""
        return self.owner == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        """End the server, which ends its children."""
        atexit.unregister(self.close)
        if self.owner != os.getpid():
            return
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


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


def _read_frame(descriptor: int, *, end: float) -> bytes:
    (length,) = struct.unpack("!I", _read(descriptor, 4, end=end))
    return _read(descriptor, length, end=end)


def _read(descriptor: int, count: int, *, end: float) -> bytes:
    text, poll = b"", select.poll()
    poll.register(descriptor, select.POLLIN)
    while len(text) < count:
        if not poll.poll(1000 * max(0.0, end - time.monotonic())):
            raise EOFError("no answer")
        part = os.read(descriptor, count - len(text))
        if not part:
            raise EOFError("end of output")
        text += part
    return text


def _outcome(reply: bytes, *, count: int) -> Run:
    """Return a run from the child's output, which the program may have forged."""
    if not reply:
        return Run(starts=True, error="ended early")
    try:
        answer = json.loads(reply)
    except (ValueError, RecursionError):
        return Run(starts=True, error="output is unreadable")
    if (
        isinstance(answer, list)
        and len(answer) == count
        and all(isinstance(c, dict) for c in answer)
    ):
        return Run(starts=True, calls=answer)
    error = answer.get("error") if isinstance(answer, dict) else None
    # without an error there would be results
    if not isinstance(error, str) or not error:
        return Run(starts=True, error="output is unreadable")
    return Run(starts=bool(answer.get("starts")), error=error[:200])
