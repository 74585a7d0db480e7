"""Start of agent programs by a supervisor process, see `ragen_pl.agent_programs.supervisor`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ragen_pl.agent_programs.variables import program_variables
from ragen_pl.base.files import OwnFolder

_PREFIX = "program_"
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramLimits:
    """Limits of a program's processes.

    Attributes:
        memory_mb: Address space of each process in MiB; None for no limit.
        file_mb: Size of each file that it writes in MiB; None for no limit.
        disk_mb: Size of all files in its folder in MiB; None for no limit.
        output_kb: End of its output that is kept, in KiB.
    """

    memory_mb: int | None = None
    file_mb: int | None = 256
    disk_mb: int | None = 2048
    output_kb: int = 64


class ProgramLauncher:
    """Start programs. The supervisor is started with the first one.

    Args:
        function: Import path of a function that is run in place of a command; None for commands.
    """

    def __init__(self, function: str | None = None) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._folder: OwnFolder | None = None
        self._owner = os.getpid()

    def new_folder(self) -> Path:
        """Return an empty folder for a program. A later run removes it where this process is killed."""
        with self._lock:
            self._forget_if_forked()
            if self._folder is not None:
                # a program may have removed the folder that all are in
                with suppress(OSError):
                    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._folder.path))
            self._folder = OwnFolder("ragen_programs_")
            return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._folder.path))

    def start(
        self,
        command: Sequence[str] | None,
        *,
        folder: str,
        environment: Mapping[str, str],
        limits: ProgramLimits,
    ) -> socket.socket:
        """Start a program and return its connection, which brings its outcome. Shutting it down kills the program.

        Args:
            command: The command; None for the launcher's function.
            folder: Its working directory.
            environment: Variables in addition to those that every program gets.
            limits: Limits of its processes.

        Raises:
            RuntimeError: The supervisor does not start.
        """
        order = {
            "command": None if command is None else [*command],
            "environment": program_variables() | dict(environment),
            "folder": folder,
            "memory_mb": limits.memory_mb,
            "file_mb": limits.file_mb,
            "disk_mb": limits.disk_mb,
            "output_bytes": 1024 * limits.output_kb,
        }
        connection = self._connection()
        connection.sendall(json.dumps(order).encode() + b"\n")
        return connection

    def _connection(self) -> socket.socket:
        """Return the owner's end of a new connection to the supervisor; start one where none runs."""
        own, other = socket.socketpair()
        with self._lock, other:
            self._forget_if_forked()
            if self._control is not None:
                # a program may have killed it
                with suppress(BrokenPipeError, ConnectionResetError):
                    socket.send_fds(self._control, [b"p"], [other.fileno()])
                    return own
            self._control = self._started()
            socket.send_fds(self._control, [b"p"], [other.fileno()])
        return own

    def _forget_if_forked(self) -> None:
        """Forget the folder and the supervisor of the process that this one is a fork of."""
        if self._owner != os.getpid():
            self._owner, self._folder, self._control = os.getpid(), None, None

    def _started(self) -> socket.socket:
        """Start a supervisor and return the socket that it gets connections over.

        Raises:
            RuntimeError: It does not start.
        """
        control, its_end = socket.socketpair()
        named = [] if self._function is None else [self._function]
        with its_end:
            process = subprocess.Popen(
                [sys.executable, str(_SUPERVISOR), *named],
                stdin=its_end.fileno(),
                stdout=subprocess.PIPE,
                env=program_variables(),
                start_new_session=True,
            )
        weakref.finalize(self, _end, process, control)
        if hasattr(os, "waitid"):  # not on macOS before Python 3.13
            threading.Thread(target=_kill_if_stopped, args=(process.pid,), daemon=True).start()
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the supervisor of programs does not start; see its error above")
        return control


def _kill_if_stopped(supervisor: int) -> None:
    """Kill a supervisor that a program stops. Programs that are given to it would wait for ever."""
    # its state is left to `_end`; an error is that `_end` has taken it
    with suppress(ChildProcessError, ProcessLookupError):
        state = os.waitid(os.P_PID, supervisor, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if state is not None and state.si_code == os.CLD_STOPPED:
            os.kill(supervisor, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """End a supervisor, which ends its programs."""
    assert process.stdout is not None
    control.close()
    try:
        process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
