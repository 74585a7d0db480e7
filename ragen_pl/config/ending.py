"""Ends of commands: an error's last line, its exit code, and a traceback where nothing explains it."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hydra.errors import InstantiationException

from ragen_pl.base.error_text import error_text, exit_code, named_error, shortened
from ragen_pl.base.foreign_files import ForeignFileError
from ragen_pl.base.stop_signals import stop_behind
from ragen_pl.config.errors import ConfigError, in_one_line, of_instantiation

Result = TypeVar("Result")
PLAIN = "put a plain file in its place, or move it away"
"""Remedy for a file that is not read."""

# something else is where a file or folder belongs
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP)
_DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE,
    *_IN_THE_WAY,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ending:
    """How an error ends a command.

    Attributes:
        line: The error and its remedy.
        code: Exit code.
        traceback: Where the error came from; empty for one that the configuration or the disk explains.
    """

    line: str
    # as argparse
    code: int = 2
    traceback: str = ""

    @property
    def expected(self) -> bool:
        """Whether a line explains the error."""
        return not self.traceback

    @property
    def text(self) -> str:
        """Text that is printed. The last line is always `ragen_pl: …`."""
        return f"{self.traceback}ragen_pl: {' '.join(self.line.split())}\n"

    def show(self) -> None:
        """Print it, after all that was printed before."""
        sys.stdout.flush()
        sys.stderr.write(self.text)


def ending_of(error: BaseException) -> Ending:
    r"""Return how an error ends a command. The remedies of an unexpected one are its notes (`add_note`).

    >>> ending_of(ConfigError("seed=x: expected a number")).text
    'ragen_pl: seed=x: expected a number\n'
    """
    if isinstance(error, ConfigError):
        return Ending(str(error))
    if isinstance(error, ForeignFileError):
        return Ending(f"{error}; {PLAIN}")
    if isinstance(error, InstantiationException):
        key, cause = of_instantiation(error)
        return Ending(f"{key}: {in_one_line(cause)}".removeprefix(": "))
    if isinstance(error, OSError) and (error.errno is None or error.errno in _DISK_ERRORS):
        return Ending(error_text(error) if error.errno is None else _disk_error(error))
    if isinstance(error, SystemExit):
        return Ending(f"ended by sys.exit({error.code!r})", code=exit_code(error) or 1)
    text = shortened(named_error(error), longest=700).removesuffix(":")
    notes = getattr(error, "__notes__", [])
    trace = traceback.TracebackException.from_exception(error)
    # they are in the last line
    trace.__notes__ = None
    return Ending("; ".join([text, *notes]), code=1, traceback="".join(trace.format()))


def or_exit(action: Callable[[], Result]) -> Result:
    """Return the result of an action; an error ends the process with one line, an unexpected one with its traceback."""
    try:
        return action()
    except Exception as error:
        if (stop := stop_behind(error)) is not None:
            raise stop from None
        ending = ending_of(error)
    ending.show()
    raise SystemExit(ending.code)


def _disk_error(error: OSError) -> str:
    place = error.filename or "a file of the run"
    remedy = "move it away" if error.errno in _IN_THE_WAY else "make room or change its rights"
    return f"{place}: {error.strerror}; {remedy}, or set paths.root=…"
