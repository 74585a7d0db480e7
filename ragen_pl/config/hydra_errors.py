"""Errors of Hydra's composition, translated into one line each."""

from __future__ import annotations

import re

from ragen_pl.base.constraints import did_you_mean
from ragen_pl.config.errors import ConfigError


def missing_key(error: Exception) -> str | None:
    """Return the key of an override that no file of the configuration has; None for any other error."""
    match = re.search(r"Could not (?:override|delete from config\.) '([^']+)'", str(error))
    # a group that was given as a whole
    full_key = re.search(r"full_key: (\S+)", str(error.__cause__))
    return match and (full_key or match)[1].replace("/", ".")


def translated(error: Exception) -> str:
    """Return an error of Hydra's composition as one line."""
    if isinstance(error, ConfigError):
        return str(error)
    if hasattr(error, "problem_mark"):  # YAML's own errors
        return _yaml(error)
    text = str(error)
    for pattern, translate in _TRANSLATIONS:
        if match := re.search(pattern, text, re.DOTALL):
            return translate(match)
    first = [line.strip() for line in text.splitlines() if line.strip()]
    return first[0] if first else type(error).__name__


def _yaml(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{mark.name}, line {mark.line + 1}: " if mark else ""
    text = " ".join(str(getattr(error, "problem", None) or error).split())
    return f"{where}not YAML ({text}); correct the line, or quote the value"


def _unknown_option(match: re.Match[str]) -> str:
    group, _sep, option = match["option"].rpartition("/")
    options = (match["options"] or "").split()
    if (group, option) == ("rollout/engine", "openai"):
        return (
            "rollout/engine=openai: training needs the log-probs of the sampled ids, which a chat API does not give; "
            "evaluate and play take endpoint=openai"
        )
    guess = did_you_mean(option, options)
    own = "; your own class is env=my_module.MyClass, a gymnasium id env=gym env.kwargs.id=…"
    offers = (
        f"{group} is one of {', '.join(options)}"
        if options
        else f"there is no {match['option']}.yaml"
    )
    return (
        f"{group}={option}: no such option{guess or ';'} {offers}{own if group == 'env' else ''}"
        if group
        else f"no configuration {option}.yaml"
    )


def _grammar(match: re.Match[str]) -> str:
    return f"{match['text']}: expected key=value"


_TRANSLATIONS = (
    (r"Could not (?:find|load) '(?P<option>[^']+)'\.?"
     r"(?:\s*Available options in '[^']*':\n(?P<options>(?:\t[^\n]*\n)*))?", _unknown_option),
    (r"config group '(?P<group>[^']+)' does not exist", lambda m: f"unknown group {m['group']}"),
    (r"Error parsing override '(?P<text>[^']*)'", _grammar),
    (r"LexerNoViableAltException: (?P<text>[^\n]*)", _grammar),
    (r"Ambiguous value for argument '(?P<key>[^=']+)=(?P<value>[^']*)'",
     lambda m: f"{m['key']}={m['value']}: several values; add --multirun to sweep over them, "
     f"or write '{m['key']}=[{m['value']}]' for a list"),
    (r"An item is already at '(?P<key>[^']+)'",
     lambda m: f"+{m['key']}: the key exists; leave out the +"),
)  # fmt: skip
