"""Errors of the configuration, and of a command, in one line each."""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from hydra.errors import InstantiationException

Result = TypeVar("Result")

_DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR,
)  # fmt: skip


class ConfigError(ValueError):
    """Configuration that cannot be run. The text is one line: what was found, what was expected, the remedy."""


@contextmanager
def config_errors(place: str, *, hint: str = "") -> Iterator[None]:
    """Turn any error of a block into a ConfigError. For code that builds a run, not for code that runs it.

    Args:
        place: key, or key and value, that the block builds something from.
        hint: remedy, if the error itself has none.

    Raises:
        ConfigError: in place of the error.

    >>> with config_errors("model.build.path=qwen", hint="give a folder"):
    ...     raise OSError("nothing there")
    Traceback (most recent call last):
        ...
    ragen_pl.config.errors.ConfigError: model.build.path=qwen: nothing there; give a folder
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        key, cause = of_instantiation(error)
        text = in_one_line(cause)
        # messages of this project begin with the key if the class knows it
        has_key = re.match(r"[a-z_]+([./][a-z_]+)+[=: ]", text)
        message = text if has_key else f"{key or place}: {text}"
        raise ConfigError(message + (f"; {hint}" if hint else "")) from error


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
    if isinstance(error, InstantiationException):
        key, cause = of_instantiation(error)
        return Ending(f"{key}: {in_one_line(cause)}".removeprefix(": "))
    if isinstance(error, OSError) and (error.errno is None or error.errno in _DISK_ERRORS):
        return Ending(str(error) if error.errno is None else _disk_error(error))
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        return Ending(f"ended by sys.exit({error.code!r})", code=code or 1)
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:700]}".removesuffix(": ")
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
        ending = ending_of(error)
    ending.show()
    raise SystemExit(ending.code)


def _disk_error(error: OSError) -> str:
    place = error.filename or "a file of the run"
    return f"{place}: {error.strerror}; make room or change its rights, or set paths.root=…"


def of_instantiation(error: BaseException) -> tuple[str, BaseException]:
    """Return the key that Hydra was building, empty for other errors, and the error that stopped it."""
    if not isinstance(error, InstantiationException):
        return "", error
    text = str(error)
    key = text.rpartition("full_key: ")[2] if "full_key: " in text else ""
    cause = error.__cause__ or error
    return key, cause.__cause__ or cause if isinstance(cause, InstantiationException) else cause


def in_one_line(error: BaseException, *, longest: int = 700) -> str:
    r"""Return the text of an error without line breaks, with its class if the text is a single word.

    >>> in_one_line(KeyError("door")), in_one_line(ValueError("two\nlines"))
    ("KeyError: 'door'", 'two lines')
    """
    text = " ".join(str(error).split())
    if len(text) > longest:
        text = f"{text[:longest]}…"
    return text if " " in text else f"{type(error).__name__}: {text}".removesuffix(": ")
