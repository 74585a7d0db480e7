"""Trust in files of settings. The command line is; a run's or a model's own file need not be.

Settings name classes and functions, which are then called with the rest of the settings: somebody else's file could
name any code. It is read under this rule:

    written by this account ──► as it is
    another ──► names of code, and addresses, count only where a shipped configuration or the command line has them;
                texts that a shipped class declares as in need of trust (`needs_trust`), only there too
    trust=true on the command line ──► as it is

Which files this account wrote is told by their signatures (`ragen_pl.config.own_files`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from ragen_pl.base.foreign_files import model_folder_problem, unsafe_entry
from ragen_pl.base.former_names import current
from ragen_pl.config.check import class_path
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.nodes import leaves, nodes
from ragen_pl.config.paths import config_dir
from ragen_pl.config.signatures import declared_trust

# settings whose texts are for a model
_TEXTS = "context."
# groups whose options name what a checkpoint is used with; other engines take arguments that name code
_SHIPPED = (
    *("env/*", "model/*", "validation/baselines/*", "warm_start/demonstrator/*"),
    "rollout/engine/transformers",
)
# keys whose value is always a name; the last one is LoRA's
_NAMED = ("_target_", "env.target", "megatron_core")
# the environment's, or those of a mixture
_TARGET = re.compile(r"env(\.environments\.[^.]+)?\.target")
# keys that have code of a model's repository run
_RUNS_CODE = "trust_remote_code"
# keys of Hydra's own that say how an object is built
_HYDRA = ("_target_", "_partial_", "_recursive_", "_convert_")
# packages whose classes declare what they need trust for, modules of ids, and classes of others without a text
_PACKAGE, _ID_MODULES = "ragen_pl.", ("ragen_pl.envs:", "ragen_pl.visual_envs:")
_OTHERS = ("torch.optim.AdamW",)
_WHOLE = "*"
# characters of a value in a message
_SHOWN = 200
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
# package.module.Class, module:id, scheme://place
_NAME = re.compile(r"\s*([^\W\d]\w*(\.[^\W\d]\w*)+\s*|[\w.+-]+:.+)", re.DOTALL)


def check_settings(
    settings: Mapping[str, Any],
    *,
    file: Path,
    given: Mapping[str, Any] | None,
    shipped: tuple[str, ...] = _SHIPPED,
) -> None:
    """Check settings of a file that somebody else may have written.

    Args:
        settings: Those that are taken from it.
        file: The file, for error messages.
        given: What the command line sets in place of them, see `replaced_by`; None for a command that does not take
            such settings.
        shipped: Patterns of the shipped configurations whose names count.

    Raises:
        ConfigError: They name code or an address that neither a shipped configuration nor the command line has, set
            what a class declares as in need of trust (`needs_trust`), run code of a model's repository, or refer to
            other values.
    """
    for key, problem in _problems(settings, given=given or {}, shipped=shipped):
        name = key.partition("=")[0]
        repeat = "" if given is None else f"give {name}=… on the command line, or "
        line = (
            f"{file}: {key}{problem}, and nothing shows that this account wrote the file; if you trust its author, "
            f"{repeat}set trust=true"
        )
        raise ConfigError(_CONTROL.sub(" ", line))


def check_folder(folder: Path | None, *, key: str, is_model: bool = False) -> None:
    """Check that nothing in a folder that somebody else may have written leads out of it, or never ends.

    Args:
        folder: A run's folder, or a model's.
        key: The setting that names it, for error messages.
        is_model: Whether it is a model's.

    Raises:
        ConfigError: Something does.
    """
    if folder is None or not folder.is_dir():
        return
    try:
        problem = model_folder_problem(folder) if is_model else unsafe_entry(folder)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    if problem is not None:
        line = f"{key}: {problem}; give a folder without, or set trust=true if you trust its author"
        raise ConfigError(_CONTROL.sub(" ", line))


def replaced_by(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Return the keys whose values a setting of the command line replaces, with the new ones.

    A mapping is merged with the file's; a list replaces it.
    """
    inner = leaves({key: value}, lists=False)
    return (each for each in inner if each[1] != {})


def _problems(
    settings: Mapping[str, Any], *, given: Mapping[str, Any], shipped: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Yield the key of each setting that is not taken at its word, with a clause about it."""
    found = [(key, value) for key, value in nodes(settings) if not _is_set(key, given)]
    for key, setting in found:
        if key.endswith(_RUNS_CODE) and setting:
            yield f"{key}=true", " runs Python files of a model's repository"
    for key, setting in found:
        name, value = key.rpartition(".")[2], setting if isinstance(setting, str) else ""
        shown = f"{key}={value[:_SHOWN]}"
        if name.startswith("_") and name not in _HYDRA:
            yield key, " tells the library that builds objects what to call"
        if "${" in value:
            yield shown, ": refers to another value"
        is_name = (
            key.endswith(_NAMED)
            or _TARGET.fullmatch(key)
            or (_NAME.fullmatch(value) and not key.startswith(_TEXTS))
        )
        if is_name and current(value) not in _shipped_names(shipped):
            yield shown, " names code or an address"
    texts = _shipped_texts(shipped)
    for key, in_file, arguments in _components(settings):
        target, is_given = str(given.get(key, in_file)), key in given
        declared = _declared(target)
        if is_given and declared is None:
            continue  # the user's own class
        if not is_given and (declared is None or _WHOLE in declared):
            yield f"{key}={target}", " may start, import, open or send anything"
        for place, inner, value in arguments:
            is_known = (inner.rpartition(".")[2], value) in texts or _is_set(place, given)
            if not is_known and any(_covers(pattern, inner) for pattern in declared or ()):
                shown = f"{place}={value[:_SHOWN]}"
                yield shown, f": by it {target} may start, import, open or send something"


def _components(
    settings: Mapping[str, Any],
) -> Iterator[tuple[str, str, list[tuple[str, str, str]]]]:
    """Yield the key and the value of each name of a class, and the texts among its arguments.

    A text has its full key, its dotted name in the arguments, and its value. Items of a list have the list's name.
    """
    for key, node in [("", settings), *nodes(settings)]:
        match node:
            case {"_target_": str(target)}:
                yield f"{key}._target_", target, list(_texts(node, key))
        match node:
            case {"target": str(target)} if _TARGET.fullmatch(f"{key}.target"):
                # a configuration may have keys beside kwargs that these refer to
                given = [*_texts(node, key), *_texts(node.get("kwargs"), f"{key}.kwargs")]
                yield f"{key}.target", target, given


def _texts(arguments: Any, key: str) -> Iterator[tuple[str, str, str]]:
    for place, value in islice(nodes({key: arguments}), 1, None):
        place = place.removeprefix(".")
        inner = re.sub(r"(\.\d+)+$", "", place).removeprefix(f"{key}.")
        if isinstance(value, str) and not inner.startswith("_"):
            yield place, inner, value


def _covers(pattern: str, name: str) -> bool:
    """Return whether a declared pattern stands for an argument or for a part of it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: n + 1]), pattern) for n in range(len(parts)))


def _is_set(key: str, given: Mapping[str, Any]) -> bool:
    """Return whether the command line sets a key, or the whole list that it is in."""
    return any(f"{key}.".startswith(f"{one}.") for one in given)


def _declared(target: str) -> tuple[str, ...] | None:
    """Return what a class declares as in need of trust; None for one that is not shipped or declares nothing."""
    target = current(target)
    if target in _OTHERS:
        return ()
    # a gymnasium id is looked up by an import of its module
    if ":" in target and not target.startswith(_ID_MODULES):
        return None
    path = class_path(target)
    return declared_trust(path) if path and path.startswith(_PACKAGE) else None


@functools.cache
def _shipped_names(places: tuple[str, ...]) -> frozenset[str]:
    """Return the names of code in shipped configurations."""
    files = [file for place in places for file in config_dir().glob(f"{place}.yaml")]
    names = (re.findall(r"^ *_?target_?: (\S+)", file.read_text("utf-8"), re.M) for file in files)
    return frozenset(name for found in names for name in found)


@functools.cache
def _shipped_texts(places: tuple[str, ...]) -> frozenset[tuple[str, str]]:
    """Return the texts in shipped configurations, each with the last name of its key; addresses do not count."""
    files = [file for place in places for file in config_dir().glob(f"{place}.yaml")]
    loaded = (yaml.safe_load(file.read_text("utf-8")) for file in files)
    texts = (item for settings in loaded for item in _texts(settings, ""))
    return frozenset(
        (inner.rpartition(".")[2], value) for _, inner, value in texts if "://" not in value
    )
