"""Errors of Hydra's composition, translated into one line each."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ragen_pl.config.check import fields_at, unknown_key
from ragen_pl.config.errors import ConfigError
from ragen_pl.constraints import did_you_mean


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
    key = match["key"].replace("/", ".")
    parent, _, name = key.rpartition(".")
    node = fields_at(parent)
    # siblings in the composed config belong to the class that was chosen
    siblings = [
        other.removeprefix(f"{parent}.").partition(".")[0]
        for other in keys
        if other.startswith(f"{parent}.")
    ]
    if name in siblings or name in node.parameters:
        return f"unknown key {key} in the configuration that was chosen; see --cfg job for its keys"
    hint = "" if node.closed else f"; a new one needs +{key}=…"
    return unknown_key(key, dict.fromkeys([*siblings, *node.parameters]), keys=keys) + hint


def _unknown_option(match: re.Match[str], _: tuple[str, ...]) -> str:
    group, _sep, option = match["option"].rpartition("/")
    options = (match["options"] or "").split()
    if (group, option) == ("rollout/engine", "openai"):
        return (
            "rollout/engine=openai: training needs the log-probs of the sampled ids, which a chat API does not give; "
            "evaluate and play take endpoint=openai"
        )
    guess = did_you_mean(option, options)
    offers = (
        f"{group} is one of {', '.join(options)}"
        if options
        else f"there is no {match['option']}.yaml"
    )
    return (
        f"{group}={option}: no such option{guess or ';'} {offers}"
        if group
        else f"no configuration {option}.yaml"
    )


def _no_group(match: re.Match[str], keys: tuple[str, ...]) -> str:
    groups = {key.split(".")[0] for key in keys}
    return f"unknown group {match['group']}{did_you_mean(match['group'], groups)}"


def _delete(match: re.Match[str], keys: tuple[str, ...]) -> str:
    return f"~{match['key']}: there is no such key{did_you_mean(match['key'], keys)}"


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
