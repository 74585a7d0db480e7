"""Errors of the configuration in one line each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import InstantiationException

from ragen_pl.base.error_text import error_text, shortened


class ConfigError(ValueError):
    """Configuration that cannot be run. The text is one line: what was found, what was expected, the remedy."""


@contextmanager
def config_errors(place: str, *, hint: str = "") -> Iterator[None]:
    """Turn any error of a block into a ConfigError. For code that builds a run, not for code that runs it.

    Args:
        place: Key, or key and value, that the block builds something from.
        hint: Remedy, if the error itself has none.

    Raises:
        ConfigError: In place of the error.

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
    text = shortened(error_text(error), longest=longest)
    return text if " " in text else f"{type(error).__name__}: {text}".removesuffix(": ")
