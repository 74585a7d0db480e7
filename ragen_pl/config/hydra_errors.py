"""Errors of Hydra's composition, translated into one line each."""

from __future__ import annotations

import re

from hydra.errors import OverrideParseException

from ragen_pl.base.constraints import did_you_mean
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.paths import config_dir

# how to give what is of no file, by group
_OWN = {
    "env": "; your own class is env=my_module.MyClass, a gymnasium id env=gym env.kwargs.id=…",
    "model": "; a folder, or a name at Hugging Face, is model=pretrained model.build.path=…",
}


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
    if isinstance(error, OverrideParseException):
        return _malformed(error.override)
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
    group, option = _choice(match["option"])
    options = (match["options"] or "").split()
    if (group, option) == ("rollout/engine", "openai"):
        return (
            "rollout/engine=openai: training needs the log-probs of the sampled ids, which a chat API does not give; "
            "evaluate and play take endpoint=openai"
        )
    if not group:
        return f"no configuration {option}.yaml"
    guess = did_you_mean(option, options)
    offers = (
        f"{group} is one of {', '.join(options)}"
        if options
        else f"there is no {match['option']}.yaml"
    )
    return f"{group}={option}: no such option{guess or ';'} {offers}{_OWN.get(group, '')}"


def _choice(path: str) -> tuple[str, str]:
    """Return a group and the option of it that a line has asked for, which may be a path itself.

    >>> _choice("model/Qwen/Qwen2.5-0.5B"), _choice("model//data/qwen"), _choice("rollout/engine/vlm")
    (('model', 'Qwen/Qwen2.5-0.5B'), ('model', '/data/qwen'), ('rollout/engine', 'vlm'))
    """
    parts = path.split("/")
    for count in range(len(parts) - 1, 0, -1):
        group = "/".join(parts[:count])
        if not {"", "."} & set(parts[:count]) and (config_dir() / group).is_dir():
            return group, "/".join(parts[count:])
    group, _, option = path.rpartition("/")
    return group, option


def _malformed(line: str) -> str:
    """Return the error of an override that cannot be read.

    >>> _malformed("trico")
    'trico: expected key=value; did you mean algorithm=trico?'
    """
    if "=" in line:
        return f"{line}: expected key=value; quote a value with signs in it"
    files = sorted(file for file in config_dir().glob("*/**/*.yaml") if file.stem == line)
    groups = [file.parent.relative_to(config_dir()).as_posix() for file in files]
    guess = f"did you mean {groups[0]}={line}?" if groups else "--help shows the keys"
    return f"{line}: expected key=value; {guess}"


_TRANSLATIONS = (
    (r"Could not (?:find|load) '(?P<option>[^']+)'\.?"
     r"(?:\s*Available options in '[^']*':\n(?P<options>(?:\t[^\n]*\n)*))?", _unknown_option),
    (r"config group '(?P<group>[^']+)' does not exist", lambda m: f"unknown group {m['group']}"),
    (r"Ambiguous value for argument '(?P<key>[^=']+)=(?P<value>[^']*)'",
     lambda m: f"{m['key']}={m['value']}: several values; add --multirun to sweep over them, "
     f"or write '{m['key']}=[{m['value']}]' for a list"),
    (r"An item is already at '(?P<key>[^']+)'",
     lambda m: f"+{m['key']}: the key exists; leave out the +"),
)  # fmt: skip
