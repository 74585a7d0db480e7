"""Environments in processes of their own: one that hangs, crashes or leaks memory costs its own episode only.

The process is a new interpreter that imports the environment and no model. It answers one call after the other over a
pipe. It ends when the pipe is closed, even where the environment hangs, so it never outlives its owner. Its answer to a
step brings along the members that were read after the last one.
"""

from __future__ import annotations

import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from typing import Any

import gymnasium
import numpy as np

from ragen_pl.base.error_text import error_text, named_error
from ragen_pl.base.instances import instances
from ragen_pl.environments.causes import InfrastructureError, cause_of
from ragen_pl.environments.classes import environment_maker
from ragen_pl.trajectory import FailureCause

_END_S = 5.0
# what a call returned; an error has its cause instead
_OK = "ok"
_MIB = 1024 * 1024


class ProcessEnvironment(gymnasium.Env[Any, Any]):
    """An environment in a process of its own. All its members are called there; closed it has the values read last.

    Args:
        target: gymnasium id or class path.
        kwargs: Arguments of the environment.
        memory_mb: Memory that the process may allocate in MiB; None for no limit.

    Attributes:
        process: The process.
        round_trips: Number of requests sent to it.

    Raises:
        Exception: The environment's own error, from any call.
        RuntimeError: The process has ended.
    """

    def __init__(
        self, target: str, kwargs: Mapping[str, object], *, memory_mb: int | None = None
    ) -> None:
        self._lock = threading.Lock()
        self.round_trips = 0
        self._pipe, other = Pipe()
        with other:
            command = [sys.executable, "-m", __name__, str(other.fileno())]
            # prints of the environment do not get into the output of a run
            self.process = subprocess.Popen(
                command,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
        # members other than values: whether each is a method, or missing
        self._is_method: dict[str, bool] = {}
        # members that came with the last answer, those read since then, and those read after each kind of request
        self._brought: dict[str, Any] = {}
        self._read: dict[str, None] = {}
        self._read_after: dict[str, dict[str, None]] = {}
        self._last = ""
        self._values: dict[str, Any] = {}
        self._is_closed = False
        try:
            self._ask("make", target, dict(kwargs), memory_mb)
            self.action_space = self._ask("get", "action_space")[1]
            self._names = self._ask("names")
        except BaseException:
            self.kill()
            raise

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment."""
        result: tuple[Any, dict[str, Any]] = self._advance("reset", seed, options)
        return result

    def step(self, action: int | str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        result: tuple[Any, float, bool, bool, dict[str, Any]] = self._advance("step", action)
        return result

    def render(self) -> Any:
        """Return the rendering of the environment."""
        return self._call("render")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the environment in this process, in which a policy looks ahead."""
        return self._ask("copied")

    def close(self) -> None:
        """Close the environment and end its process."""
        self._is_closed = True
        try:
            if self.process.poll() is None:
                self._ask("close")
        finally:
            self._pipe.close()
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """End the process at once, whatever it does. Any thread may call this."""
        self.process.kill()
        self.process.wait()

    def __dir__(self) -> list[str]:
        """Return the names of the environment's members too."""
        return sorted({*super().__dir__(), *self._names})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._is_closed and name in self._values:
            return self._values[name]
        if name not in self._is_method:
            if name in self._brought:
                kind, value = "value", self._brought.pop(name)
            else:
                kind, value = self._ask("get", name)
            if kind == "value":
                self._values[name] = value
                return self._note(name, value)
            self._is_method[name] = kind == "method"
        if not self._is_method[name]:
            raise AttributeError(f"the environment has no {name}")
        return partial(self._call, name)

    def _call(self, name: str, *args: Any) -> Any:
        if not args and name in self._brought:
            return self._note(name, self._brought.pop(name))
        # it may change the state
        self._brought.clear()
        result = self._ask("call", name, args)
        return result if args else self._note(name, result)

    def _note(self, name: str, value: Any) -> Any:
        """Return the value of a member that the next answer may bring along."""
        self._read[name] = None
        return value

    def _advance(self, kind: str, *request: Any) -> Any:
        """Reset or step, and get the members that were read after the last request of this kind."""
        self._read_after[self._last] = self._read
        wanted = list(self._read_after.get(kind, ()))
        self._brought, self._read, self._last = {}, {}, kind
        result, self._brought = self._ask(kind, *request, wanted)
        return result

    def _ask(self, *request: Any) -> Any:
        with self._lock:
            self.round_trips += 1
            try:
                self._pipe.send(request)
                answer, result = self._pipe.recv()
            except (EOFError, OSError) as error:
                code = self.process.wait()
                raise RuntimeError(
                    f"the process of the environment ended with exit code {code}"
                ) from InfrastructureError(str(error))
        # the errors that led to it stay in the other process
        if answer == FailureCause.INFRASTRUCTURE:
            raise result from InfrastructureError()
        if answer == FailureCause.DATA:
            raise result
        if request[0] == "call":
            # the draws made there count here
            result, states = result
            generators = instances(request[2], np.random.Generator)
            for generator, state in zip(generators, states, strict=True):
                generator.bit_generator.state = state
        return result


class _Served:
    """The environment in its process, and the answers to the calls of its owner."""

    env: gymnasium.Env[Any, Any]

    def make(self, target: str, kwargs: dict[str, Any], memory_mb: int | None) -> None:
        if memory_mb is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_mb * _MIB, memory_mb * _MIB))
        self.env = environment_maker(target)(**kwargs)

    def reset(self, seed: int | None, options: Any, wanted: list[str]) -> tuple[Any, Any]:
        return self.env.reset(seed=seed, options=options), self._members(wanted)

    def step(self, action: int | str, wanted: list[str]) -> tuple[Any, Any]:
        return self.env.step(action), self._members(wanted)

    def _members(self, names: list[str]) -> dict[str, Any]:
        """Return the values of members and methods without arguments; one that raises is left to be asked for."""
        members: dict[str, Any] = {}
        for name in names:
            with suppress(Exception):
                value = getattr(self.env.unwrapped, name)
                members[name] = value() if callable(value) else value
        return members

    def names(self) -> list[str]:
        return dir(self.env.unwrapped)

    def get(self, name: str) -> tuple[str, Any]:
        try:
            value = getattr(self.env.unwrapped, name)
        except AttributeError:
            return "missing", None
        return ("method", None) if callable(value) else ("value", value)

    def call(self, name: str, args: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        result = getattr(self.env.unwrapped, name)(*args)
        generators = instances(args, np.random.Generator)
        return result, [generator.bit_generator.state for generator in generators]

    def copied(self) -> gymnasium.Env[Any, Any]:
        return self.env.unwrapped

    def close(self) -> None:
        self.env.close()


def _end_with(pipe: int) -> None:
    """End this process when its owner has gone, whatever the environment does."""
    poll = select.poll()
    # hang-ups are reported without being asked for
    poll.register(pipe, 0)
    poll.poll()
    # time for an orderly end
    time.sleep(_END_S)
    os._exit(1)


def _serve(pipe: Connection) -> None:
    threading.Thread(target=_end_with, args=(pipe.fileno(),), daemon=True).start()
    served = _Served()
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (_OK, getattr(served, name)(*arguments))
        except Exception as error:
            answer = (cause_of(error), error)
        _send(pipe, answer)
        if name == "close":
            return


def _send(pipe: Connection, answer: tuple[str, Any]) -> None:
    try:
        pipe.send(answer)
    # what cannot be pickled, an exception among it
    except Exception as error:
        kind, value = answer
        if kind == _OK:
            kind, text = FailureCause.DATA, error_text(error)
        else:
            text = named_error(value)
        pipe.send((kind, RuntimeError(text)))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
