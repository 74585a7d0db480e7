"""A process that runs one program.

It is started before there is a program for it. The hidden inputs of a request enter it when the results of the others
have left it.
"""

from __future__ import annotations

import bisect  # noqa: F401 (programs may import what is imported here)
import collections
import functools  # noqa: F401
import heapq  # noqa: F401
import itertools  # noqa: F401
import json
import math  # noqa: F401
import operator  # noqa: F401
import os
import random
import re  # noqa: F401
import signal
import string  # noqa: F401

from .confinement import REQUEST, RESULT, Confinement
from .frames import read_frame

TYPE_CHECKING = False
if TYPE_CHECKING:  # an import of `typing` would cost each child time
    from typing import Any

Child = collections.namedtuple("Child", ("pid", "request", "result"))
"""A process that waits for its program, and the descriptors to write the request to and to read the result from."""

_PLAIN = (bool, int, float, str, type(None))
_MAX_ERROR = 200
# a request for a program with much of what the player's programs do
_FIRST = json.dumps(
    {
        "program": "import math\ndef f(x):\n y = [n * 2 for n in sorted(x)]\n return str(max(y, default=0)).upper()",
        "name": "f",
        "inputs": [[3, 1, 2]] * 10,
    }
)


def start_child(confinement: Confinement) -> Child:
    """Start a process that confines itself and waits for a request.

    Raises:
        OSError: There are too many processes or open descriptors.
    """
    descriptors = list(os.pipe())
    try:
        descriptors += os.pipe()
        pid = os.fork()
    except OSError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    request_reader, request_writer, result_reader, result_writer = descriptors
    if pid == 0:
        run_child(confinement, request_reader, result_writer)
    os.close(request_reader)
    os.close(result_writer)
    return Child(pid, request_writer, result_reader)


def run_child(confinement: Confinement, request: int, result: int) -> None:
    """Run a program in this process and write its results to a descriptor. Does not return."""
    try:
        confinement.enter(request, result)
        # `random` takes a seed of its own after a fork; a program's results are the same in all children
        random.seed(0)
        # takes what memory the first request to a process takes
        warm_up()
        function, inputs = _defined(read_frame(REQUEST))
        _write(_results(function, inputs))
        _write(_results(function, json.loads(read_frame(REQUEST))))
        # The end of a process takes time; that of this one comes when nothing else is to do.
        os.read(REQUEST, 1)
    except BaseException as error:
        failure = {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR], "starts": False}
        _write(json.dumps(failure).encode())
    finally:
        os._exit(0)


def _defined(text: str | bytes) -> tuple[Any, list[Any]]:
    """Return the function that the program of a request defines, and the inputs.

    Raises:
        BaseException: The program does not start, or ends this process.
    """
    request = json.loads(text)
    space: dict[str, Any] = {"__name__": "program"}
    exec(compile(request["program"], "program", "exec"), space)
    return space[request["name"]], request["inputs"]


def _results(function: Any, inputs: list[Any]) -> bytes:
    """Return the value or the error of each call."""
    return json.dumps([_call(function, value) for value in inputs]).encode()


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


def _write(text: bytes) -> None:
    line = text + b"\n"
    while line:
        line = line[os.write(RESULT, line) :]


def warm_up() -> None:
    """Run a program in this process, so that its children inherit the memory that the first one fills."""
    _results(*_defined(_FIRST))


def end_child(child: Child) -> int:
    """End a child and return the signal that ended it, or 0."""
    os.close(child.request)
    os.close(child.result)
    # One that has ended by itself is a zombie, which no signal changes.
    os.kill(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
