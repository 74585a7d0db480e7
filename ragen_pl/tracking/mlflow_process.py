"""MLflow in a process of its own: a run neither loads it, which takes seconds, nor shares its time with it.

The process answers one request after the other over a pipe, and ends when the pipe is closed. It may be started before
it is needed: it loads MLflow meanwhile.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragen_pl.base.error_text import error_text
from ragen_pl.config.errors import ConfigError
from ragen_pl.tracking.mlflow_run import OtherRunError, known_run
from ragen_pl.tracking.outbox import Call, RefusedError

if TYPE_CHECKING:
    from ragen_pl.tracking.mlflow_outbox import MlflowSender

# an answer without an error, and errors that keep their class
_OK = "ok"
_KEPT = {error.__name__: error for error in (ConfigError, OtherRunError, RefusedError)}


class MlflowProcess:
    """A process with MLflow. One that has ended, whatever ended it, is replaced at the next request."""

    def __init__(self) -> None:
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def start_run(self, folder: Path, *, experiment: str, uri: str) -> dict[str, Any]:
        """Create a run, see `mlflow_outbox.start_run`."""
        start: dict[str, Any] = self._ask("start_run", folder, experiment, uri)
        return start

    def sender(self, folder: Path, *, trusted: bool = False) -> ProcessSender:
        """Return the sender of a run's calls, see `MlflowSender`."""
        return ProcessSender(self, folder, trusted=trusted)

    def begin(self, folder: Path, *, trusted: bool) -> tuple[bool, str, str]:
        """Connect, see `MlflowSender.begin`; return its result and the ids of run and experiment."""
        begun: tuple[bool, str, str] = self._ask("begin", folder, trusted)
        return begun

    def send(self, call: Call) -> None:
        """Send a call of the run that was begun last, see `MlflowSender.send`."""
        self._ask("send", dict(call))

    def end(self, *, limit_s: float) -> None:
        """End the process when it has done what it does, or after a time limit."""
        if self._pipe is None or self._process is None:
            return
        self._pipe.close()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._pipe = None

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        if self._pipe is not None and self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.wait()
        self._pipe = None

    def _start(self) -> Connection:
        self._pipe, other = Pipe()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                # signals to the terminal's processes are the run's, which then sends its last records
                start_new_session=True,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        return self._pipe

    def _ask(self, name: str, *arguments: object) -> Any:
        pipe = self._pipe or self._start()
        try:
            pipe.send((name, arguments))
            status, result = pipe.recv()
        except (OSError, EOFError) as error:
            self.kill()
            raise ConnectionError("the process of MLflow has ended") from error
        if status == _OK:
            return result
        raise _KEPT.get(status, RuntimeError)(result)


class ProcessSender:
    """A `MlflowSender` in a process of its own.

    Args:
        process: The process.
        folder: Folder of the run.
        trusted: See `MlflowSender`.
    """

    def __init__(self, process: MlflowProcess, folder: Path, *, trusted: bool) -> None:
        self._process, self._folder, self._trusted = process, folder, trusted
        self.run_id: str = known_run(folder)["run_id"]
        self.experiment_id: str | None = None

    def begin(self) -> bool:
        """Find the run; return whether it is a new one."""
        is_new, self.run_id, self.experiment_id = self._process.begin(
            self._folder, trusted=self._trusted
        )
        return is_new

    def send(self, call: Call) -> None:
        """Send a call.

        Raises:
            RefusedError: MLflow does not accept it, or its file is gone.
        """
        self._process.send(call)


_early: list[MlflowProcess] = []


def logs_by(logger: Mapping[str, Any] | None) -> bool:
    """Return whether the logger of a config may use the process."""
    return (logger or {}).get("_target_") == "ragen_pl.tracking.loggers.RunLogger"


def start_early() -> None:
    """Start the process of a run that will log to MLflow, which then loads MLflow while the run does other things."""
    if not _early and "mlflow" not in sys.modules:
        _early.append(MlflowProcess())
        atexit.register(_end_early)


def _end_early() -> None:
    # of a run that has ended before it had a logger; the process would load MLflow to the end
    while _early:
        _early.pop().kill()


def process_of_run() -> MlflowProcess | None:
    """Return the process that a run logs by; None where the program has loaded MLflow and needs none."""
    if _early:
        return _early.pop()
    return None if "mlflow" in sys.modules else MlflowProcess()


def main() -> None:
    """Answer the requests that come over the pipe whose number is given."""
    # the owner ends it by closing the pipe, when its last records are sent
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(int(sys.argv[1]))
    # what a local store and traces load, before the first request
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

    from ragen_pl.tracking import mlflow_outbox

    mlflow_outbox.quieten()
    senders: list[MlflowSender] = []

    def start_run(folder: Path, experiment: str, uri: str) -> dict[str, Any]:
        return mlflow_outbox.start_run(folder, experiment=experiment, uri=uri)

    def begin(folder: Path, trusted: bool) -> tuple[bool, str, str | None]:
        senders[:] = [mlflow_outbox.MlflowSender(folder, trusted=trusted)]
        is_new = senders[0].begin()
        return is_new, senders[0].run_id, senders[0].experiment_id

    def send(call: Call) -> None:
        senders[0].send(call)

    requests: dict[str, Callable[..., object]] = {
        "start_run": start_run,
        "begin": begin,
        "send": send,
    }
    with suppress(EOFError, OSError):
        while True:
            name, arguments = pipe.recv()
            pipe.send(_answer(requests[name], arguments))
    # MLflow's threads are idle: all requests have been answered
    os._exit(0)


def _answer(request: Callable[..., object], arguments: tuple[object, ...]) -> tuple[str, object]:
    try:
        return _OK, request(*arguments)
    except Exception as error:
        return type(error).__name__, error_text(error)


if __name__ == "__main__":
    main()
