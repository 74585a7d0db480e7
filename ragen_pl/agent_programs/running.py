"""A program under way: its folder, its variables, its process and the verifier of what it left."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from ragen_pl.agent_programs.launcher import ProgramLauncher, ProgramLimits
from ragen_pl.agent_programs.serving.server import AgentServer
from ragen_pl.agent_programs.serving.session import Session
from ragen_pl.agent_programs.variables import program_variables

# a longer text is no environment variable
_MAX_TASK_VARIABLE = 100_000
# bytes
_MAX_RESULT, _MAX_OUTPUT = 32 * 1024 * 1024, 256 * 1024 * 1024
# between two looks at the size of a verifier's output
_LOOK_S = 0.5
# until processes that are killed have ended
_KILL_S = 5.0
# lines of the output in an error
_LINES = 10


class RunningProgram:
    """A program in a folder of its own, which is removed at the end.

    Args:
        server: Endpoint that it calls.
        session: Its session, which gets an `EXIT` event.
        launcher: Starts it.
        command: Command line; None for the launcher's function.
        task: Its task, a JSON value.
        seed: Its seed.
        variables: Further environment variables.
        limits: Limits of its processes.
    """

    def __init__(
        self,
        server: AgentServer,
        session: Session,
        launcher: ProgramLauncher,
        *,
        command: Sequence[str] | None,
        task: Any,
        seed: int,
        variables: Mapping[str, str],
        limits: ProgramLimits,
    ) -> None:
        self._variables = dict(variables)
        self._folder = launcher.new_folder()
        self._work = self._folder / "work"
        self._work.mkdir()
        text = json.dumps(task)
        (self._folder / "task.json").write_text(text)
        self._about_task = {
            "RAGEN_SEED": str(seed),
            "RAGEN_TASK_FILE": str(self._folder / "task.json"),
            "RAGEN_RESULT": str(self._folder / "result.json"),
        }
        if len(text) <= _MAX_TASK_VARIABLE:
            self._about_task["RAGEN_TASK"] = text
        access = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": session.key}
        if session.reward_key is not None:
            access["RAGEN_REWARD_KEY"] = session.reward_key
        self._connection = launcher.start(
            command,
            folder=str(self._work),
            environment={
                "HOME": str(self._work),
                "TMPDIR": str(self._work),
                **access,
                **self._about_task,
                **self._variables,
            },
            limits=limits,
        )
        server.watch(self._connection.dup(), session)

    def kill(self) -> None:
        """Kill the program with its children. `EXIT` follows."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def remove(self, *, is_lost: bool) -> None:
        """Remove the folder of a program that has ended.

        Args:
            is_lost: Whether nobody has reported its end, as where it has killed the processes that watch it. What is
                left of it is killed then.
        """
        self._connection.close()
        if is_lost:
            _kill_all_in(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)

    def result(self) -> str | None:
        """Return the result that the program wrote, None without one.

        Raises:
            ValueError: It is no file, or too long.
        """
        # reading a pipe would wait for a writer, and a link may lead to an endless device
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        path = self._folder / "result.json"
        try:
            with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise ValueError("$RAGEN_RESULT is no file")
                data = file.read(_MAX_RESULT + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"$RAGEN_RESULT cannot be read: {error.strerror}") from error
        if len(data) > _MAX_RESULT:
            raise ValueError(f"$RAGEN_RESULT has more than {_MAX_RESULT} bytes")
        return data.decode(errors="replace")

    def verified(self, verifier: Sequence[str], *, timeout_s: float) -> str:
        """Return the last line that a verifier writes in the program's folder, after its end.

        It gets the variables of a program, without the endpoint's; its `HOME` is not the one that the program had.
        Where it is killed, what it has started is too.

        Raises:
            RuntimeError: The verifier failed.
        """
        own = self._folder / "verifier"
        own.mkdir()
        environment = {
            **program_variables(), "HOME": str(own), "TMPDIR": str(own), **self._variables, **self._about_task,
        }  # fmt: skip
        try:
            # no pipes: a process that it leaves behind would hold them, and memory would hold an endless output
            with (
                TemporaryFile(dir=self._folder) as output,
                TemporaryFile(dir=self._folder) as errors,
            ):
                process = subprocess.Popen(
                    verifier,
                    cwd=self._work,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                )
                try:
                    problem = _problem_of(process, (output, errors), timeout_s=timeout_s)
                finally:
                    if process.poll() is None:
                        process.kill()
                        process.wait()
                        _kill_all_in(self._folder)
                written, said = _end_of_file(output), _end_of_file(errors)
        except (OSError, subprocess.SubprocessError) as error:
            raise RuntimeError(f"env.verifier={shlex.join(verifier)}: {error}") from error
        if problem is None and process.returncode != 0:
            # test runners say on the one what fails, others on the other
            last = last_lines(f"{written}\n{said}")
            problem = f"{_end_of(process.returncode)}; its last lines: {last}"
        if problem is not None:
            raise RuntimeError(f"env.verifier={shlex.join(verifier)}: {problem}")
        # its JSON may hold other line ends than \n
        return written.strip().rpartition("\n")[2]


def _problem_of(
    process: subprocess.Popen[bytes], files: Sequence[IO[bytes]], *, timeout_s: float
) -> str | None:
    """Wait for a process that writes to files; return why it is not waited for any longer, None once it has ended."""
    end = time.monotonic() + timeout_s
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(_LOOK_S, max(0.0, end - time.monotonic())))
            return None
        if time.monotonic() >= end:
            return f"it took longer than env.kwargs.program_s={timeout_s:g} s"
        if any(os.fstat(file.fileno()).st_size > _MAX_OUTPUT for file in files):
            return f"it wrote more than {_MAX_OUTPUT} bytes"


def _end_of_file(file: IO[bytes]) -> str:
    """Return the last part of a file as text."""
    file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_RESULT))
    text = file.read(_MAX_RESULT).decode(errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _kill_all_in(folder: Path) -> None:
    """Kill the processes that work in a folder or have it in their environment, and those that they start meanwhile."""
    mark = os.fsencode(folder)
    end = time.monotonic() + _KILL_S
    while (found := [*_processes_with(mark)]) and time.monotonic() < end:
        for process in found:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _processes_with(mark: bytes) -> Iterator[int]:
    """Yield the running processes whose working folder or environment holds a text."""
    for entry in Path("/proc").glob("[0-9]*"):
        # of other users, or ended
        with suppress(OSError):
            is_zombie = b") Z " in (entry / "stat").read_bytes()
            place = os.fsencode(os.readlink(entry / "cwd"))
            if not is_zombie and (mark in place or mark in (entry / "environ").read_bytes()):
                yield int(entry.name)


def _end_of(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def last_lines(text: str) -> str:
    """Return the last lines of an output as one."""
    lines = [line for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-_LINES:]) or "none"
