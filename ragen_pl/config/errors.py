"""Errors of the configuration in one line each; those of Hydra are translated."""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches

from hydra.errors import InstantiationException

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


def translated(error: Exception, *, keys: Iterable[str] = ()) -> str:
    """Return an error of Hydra's composition as one line.

    Args:
        error: the error.
        keys: full names of the existing settings, for suggestions.
    """
    if isinstance(error, ConfigError):
        return str(error)
    if hasattr(error, "problem_mark"):  # YAML's own errors
        return _yaml(error)
    text = str(error)
    # a group that was given as a whole
    if full_key := re.search(r"full_key: (\S+)", str(error.__cause__)):
        text = re.sub(r"(?<=Could not override ')[^']+", full_key[1], text)
    for pattern, translate in _TRANSLATIONS:
        if match := re.search(pattern, text, re.DOTALL):
            return translate(match, tuple(keys))
    first = [line.strip() for line in text.splitlines() if line.strip()]
    return first[0] if first else type(error).__name__


def _yaml(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{mark.name}, line {mark.line + 1}: " if mark else ""
    text = " ".join(str(getattr(error, "problem", None) or error).split())
    return f"{where}not YAML ({text}); correct the line, or quote the value"


def _unknown_key(match: re.Match[str], keys: tuple[str, ...]) -> str:
    # imported here: that module raises the error of this one
    from ragen_pl.config.check import fields_at, unknown_key

    key = match["key"].replace("/", ".")
    parent, _, name = key.rpartition(".")
    node = fields_at(parent)
    # siblings in the composed config belong to the class that was chosen
    siblings = [
        other.removeprefix(f"{parent}.").partition(".")[0]
        for other in keys
        if other.startswith(f"{parent}.")
    ]
    if name in siblings or name in node.known:
        return f"unknown key {key} in the configuration that was chosen; see --cfg job for its keys"
    hint = "" if node.closed else f"; a new one needs +{key}=…"
    return unknown_key(key, dict.fromkeys([*siblings, *node.known]), keys=keys) + hint


def _unknown_option(match: re.Match[str], _: tuple[str, ...]) -> str:
    group, _sep, option = match["option"].rpartition("/")
    options = (match["options"] or "").split()
    if (group, option) == ("rollout/engine", "openai"):
        return (
            "rollout/engine=openai: training needs the log-probs of the sampled ids, which a chat API does not give; "
            "evaluate and play take endpoint=openai"
        )
    near = get_close_matches(option, options, n=1)
    guess = f"did you mean {near[0]}? " if near else ""
    offers = (
        f"{group} is one of {', '.join(options)}"
        if options
        else f"there is no {match['option']}.yaml"
    )
    return (
        f"{group}={option}: no such option; {guess}{offers}"
        if group
        else f"no configuration {option}.yaml"
    )


def _no_group(match: re.Match[str], keys: tuple[str, ...]) -> str:
    close = get_close_matches(match["group"], {key.split(".")[0] for key in keys}, n=1)
    return f"unknown group {match['group']}" + (f"; did you mean {close[0]}?" if close else "")


def _delete(match: re.Match[str], keys: tuple[str, ...]) -> str:
    close = get_close_matches(match["key"], keys, n=1)
    return f"~{match['key']}: there is no such key" + (
        f"; did you mean {close[0]}?" if close else ""
    )


def _grammar(match: re.Match[str], _: tuple[str, ...]) -> str:
    return f"{match['text']}: expected key=value"


_TRANSLATIONS = (
    (r"Could not override '(?P<key>[^']+)'", _unknown_key),
    (r"Could not (?:find|load) '(?P<option>[^']+)'\.?"
     r"(?:\s*Available options in '[^']*':\n(?P<options>(?:\t[^\n]*\n)*))?", _unknown_option),
    (r"config group '(?P<group>[^']+)' does not exist", _no_group),
    (r"Could not delete from config\. '(?P<key>[^']+)' does not exist", _delete),
    (r"Error parsing override '(?P<text>[^']*)'", _grammar),
    (r"LexerNoViableAltException: (?P<text>[^\n]*)", _grammar),
    (r"Ambiguous value for argument '(?P<key>[^=']+)=(?P<value>[^']*)'",
     lambda m, _: f"{m['key']}={m['value']}: several values; add --multirun to sweep over them, "
     f"or write '{m['key']}=[{m['value']}]' for a list"),
    (r"An item is already at '(?P<key>[^']+)'",
     lambda m, _: f"+{m['key']}: the key exists; leave out the +"),
)  # fmt: skip
