"""Errors of the configuration as one line each: our own, and Hydra's told anew."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(ValueError):
    """A configuration that cannot be run. Its text is one line: what was found, expected, the mend."""


def tell(error: Exception, *, keys: Iterable[str] = ()) -> str:
    """Return an error of Hydra's composition as one line.

    Args:
        error: what was raised.
        keys: full names of the settings that exist, to guess what was meant.
    """
    if isinstance(error, ConfigError):
        return str(error)
    text = str(error)
    for pattern, told in _TRANSLATIONS:
        if match := re.search(pattern, text, re.DOTALL):
            return told(match, tuple(keys))
    first = [line.strip() for line in text.splitlines() if line.strip()]
    return first[0] if first else type(error).__name__


def _unknown_key(match: re.Match[str], keys: tuple[str, ...]) -> str:
    # imported here since these modules raise the error of this one
    from ragen_pl.config.check import unknown_key
    from ragen_pl.config.schema import is_open

    key = match["key"].replace("/", ".")
    mend = f"; a new one needs +{key}=…" if is_open(key) else ""
    return unknown_key(key, keys=keys) + mend


def _unknown_option(match: re.Match[str], _: tuple[str, ...]) -> str:
    group, _sep, option = match["option"].rpartition("/")
    options = (match["options"] or "").split()
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
