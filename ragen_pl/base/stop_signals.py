"""Signals that end a command: one line and the signal's exit code, whatever the command is doing.

    signal -> `Stopped` is raised in the main thread -> files and processes are closed -> one line, exit code

While a Trainer trains, `ragen_pl.callbacks.checkpoint` has handlers of its own, which let the run save first. This file
imports the standard library alone, so that a command hears signals while it imports everything else.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from ragen_pl.base.error_text import error_chain
from ragen_pl.base.instances import instances

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""Signals that stop a run. Job queues send SIGUSR1, a terminal that is closed SIGHUP."""

# 128 and the signal's number, as a shell reports it; a job queue starts a run again after that of SIGTERM
_TERMINATED, _INTERRUPTED = 143, 130
# seconds until a `Stopped` that Python has dropped is raised again, and those that a first one has to close files and
# processes before a second one interrupts it
_AGAIN_S, _CLOSING_S = 0.02, 0.5


class Stopped(SystemExit):
    """A signal ends the process. It is a SystemExit, which no code takes for an error of its own.

    Attributes:
        name: Name of the signal.
        code: Exit code.
    """

    def __init__(self, name: str) -> None:
        super().__init__(_INTERRUPTED if name == "SIGINT" else _TERMINATED)
        self.name = name

    def __str__(self) -> str:
        return f"stopped by {'Ctrl-C' if self.name == 'SIGINT' else self.name}"


def stopping_signals() -> list[signal.Signals]:
    """Return the signals that stop this process. One that `nohup` has it ignore stays ignored."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOPPING if number != signal.SIGHUP or not is_ignored]


class _Process:
    """What this process does with a signal."""

    # process that has the handlers; a fork has none
    owner: int | None = None
    # nested blocks in which a signal is kept for later, and the one that was
    blocks = 0
    kept: signal.Signals | None = None
    # whether a `Stopped` was raised, whether the process ends already, and whether it has said so
    is_raised = ends = is_reported = False
    # sends a signal on to launched processes
    forward: Callable[[signal.Signals], object] | None = None
    # returns what ends this process in place of a signal, such as the error of another rank
    cause: Callable[[], BaseException | None] | None = None
    # output that a terminal shows, which may be closed
    terminals: tuple[int, ...] = ()


@contextmanager
def stopped_by_signals(*, for_good: bool = False) -> Iterator[None]:
    """Let signals end the block by a `Stopped`, with one line unless the block has printed it.

    In a block inside another one, and in a thread, nothing changes.

    Args:
        for_good: Whether the process ends after the block, and ignores signals from there on.

    Raises:
        SystemExit: A signal has ended the block.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or _Process.owner == os.getpid():
        yield
        return
    numbers = stopping_signals()
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in numbers}
    before[signal.SIGALRM] = signal.getsignal(signal.SIGALRM)
    hook = sys.unraisablehook
    _Process.owner, _Process.kept = os.getpid(), None
    _Process.is_raised = _Process.ends = _Process.is_reported = False
    _Process.terminals = tuple(filter(os.isatty, (1, 2)))
    sys.unraisablehook = _raise_again(hook)
    try:
        signal.signal(signal.SIGALRM, _dropped)
        for number in numbers:
            signal.signal(number, _receive)
        yield
    except Stopped as error:
        if not _Process.is_reported:
            report(f"{error}; no run was under way")
        raise SystemExit(error.code) from None
    finally:
        _Process.ends = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if for_good and number in numbers else handler)
        sys.unraisablehook = hook
        _Process.owner = _Process.forward = _Process.cause = None


def report(text: str) -> None:
    """Print how a stopped process ends, in its first rank. Later signals change nothing any more."""
    _Process.ends = _Process.is_reported = True
    numbers = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"))
    if next((number for number in numbers if number), "0") == "0":
        # its terminal may be closed
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.write(f"ragen_pl: {text}\n")
            sys.stderr.flush()


def stop_behind(error: BaseException) -> Stopped | None:
    """Return the `Stopped` that was closing files and processes when another error came; None without one."""
    return next(iter(instances(error_chain(error), Stopped)), None)


def ending() -> None:
    """Note that this process ends. Later signals change nothing any more."""
    _Process.ends = True


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep a signal that comes in the block until its end, so that what belongs together is done together."""
    _Process.blocks += 1
    try:
        yield
    finally:
        _Process.blocks -= 1
    if not _Process.blocks and _Process.kept is not None and not _Process.ends:
        _raise(_Process.kept)


@contextmanager
def interrupted() -> Iterator[None]:
    """Let signals end a block within one of `uninterrupted`."""
    blocks, _Process.blocks = _Process.blocks, 0
    try:
        if _Process.kept is not None and not _Process.ends:
            _raise(_Process.kept)
        yield
    finally:
        _Process.blocks = blocks


def forward_to(send: Callable[[signal.Signals], object]) -> None:
    """Send signals on to the processes that this one has launched, by a function."""
    _Process.forward = send


def explained_by(cause: Callable[[], BaseException | None] | None) -> None:
    """Ask a function what ends this process in place of a signal: a launcher sends it where another rank has failed."""
    _Process.cause = cause


def leave_terminal() -> None:
    """Write no more to a terminal that has been closed: each line would be an error."""
    for descriptor in _Process.terminals:
        if not os.isatty(descriptor):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _receive(number: int, frame: FrameType | None) -> None:
    received = signal.Signals(number)
    if _Process.owner != os.getpid():
        # a fork, which ends as it would without these handlers
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    elif not _Process.ends:
        if received == signal.SIGHUP:
            leave_terminal()
        if _Process.forward is not None:
            _Process.forward(received)
        if _Process.blocks:
            _Process.kept = _Process.kept or received
        elif _Process.is_raised:
            # one raised in the middle of a `finally` would break what it closes
            _Process.kept = received
            signal.setitimer(signal.ITIMER_REAL, _CLOSING_S)
        else:
            _raise(received)


def _raise(received: signal.Signals) -> None:
    _Process.is_raised = True
    cause = None if _Process.cause is None else _Process.cause()
    raise cause or Stopped(received.name)


def _dropped(number: int, frame: FrameType | None) -> None:
    if _Process.kept is not None and not _Process.ends:
        _raise(_Process.kept)


def _raise_again(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """Return a hook that has a `Stopped` raised again where Python drops it, as in the middle of a `__del__`."""

    def dropped(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, Stopped):
            _Process.kept = signal.Signals[unraisable.exc_value.name]
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            hook(unraisable)

    return dropped
