"""Start of agent programs by a supervisor process, see `ragen_pl.programs.supervisor`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragen_pl.files import OwnFolder

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
# of the trainer's variables, those that a program gets
_KEPT = (
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "SSL_CERT_FILE",
    "TZ",
    "VIRTUAL_ENV",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramLimits:
    """Limits of a program's processes.

    Attributes:
        memory_mb: address space of each process in MiB; None for no limit.
        file_mb: size of each file that it writes in MiB; None for no limit.
        disk_mb: size of all files in its folder in MiB; None for no limit.
        output_kb: end of its output that is kept, in KiB.
    """

    memory_mb: int | None = None
    file_mb: int | None = 256
    disk_mb: int | None = 2048
    output_kb: int = 64


class ProgramLauncher:
    """Start programs. The supervisor is started with the first one.

    Args:
        function: import path of a function that is run in place of a command; None for commands.
    """

    def __init__(self, function: str | None = None) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: OwnFolder | None = None
        self._owner = os.getpid()

    def new_folder(self) -> Path:
        """Return an empty folder for a program. A later run removes it where this process is killed."""
        return Path(tempfile.mkdtemp(prefix="program_", dir=self._started()))

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
            command: the command; None for the launcher's function.
            folder: its working directory.
            environment: variables in addition to those that every program gets.
            limits: limits of its processes.

        Raises:
            RuntimeError: the supervisor does not start.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(self._started() / "socket"))
        order = {
            "command": None if command is None else [*command],
            "environment": _variables() | dict(environment),
            "folder": folder,
            "memory_mb": limits.memory_mb,
            "file_mb": limits.file_mb,
            "disk_mb": limits.disk_mb,
            "output_bytes": 1024 * limits.output_kb,
        }
        connection.sendall(json.dumps(order).encode() + b"\n")
        return connection

    def _started(self) -> Path:
        """Return the folder with the supervisor's socket; start the supervisor where none runs."""
        with self._lock:
            running = self._process is not None and self._process.poll() is None
            if self._folder is None or self._owner != os.getpid():
                running, self._owner = False, os.getpid()
                self._folder = OwnFolder("ragen_programs_")
            if not running:
                place = self._folder.path / "socket"
                place.unlink(missing_ok=True)
                named = [] if self._function is None else [self._function]
                self._process = subprocess.Popen(
                    [sys.executable, str(_SUPERVISOR), str(place), *named],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=_variables(),
                    start_new_session=True,
                )
                weakref.finalize(self, _end, self._process)
                assert self._process.stdout is not None
                if self._process.stdout.readline() != b"ready\n":
                    raise RuntimeError(
                        "the supervisor of programs does not start; see its error above"
                    )
            return self._folder.path


def _variables() -> dict[str, str]:
    """Return the environment variables of every program. Its modules may stand in the trainer's working directory."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    paths = [os.getcwd(), os.environ.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return kept


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a supervisor, which ends its programs."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
