"""Composition of a configuration from overrides, with errors in one line."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from ragen_pl.base.constraints import did_you_mean, problem
from ragen_pl.config.check import (
    annotation_at,
    check_config,
    leaves,
    takes_any_key,
    takes_argument,
    unknown_key,
)
from ragen_pl.config.environments import with_environments
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.overrides import key_of, overrides_of, with_environment
from ragen_pl.config.paths import check_packages, config_dir, searched
from ragen_pl.config.relations import unread_overrides

log = logging.getLogger(__name__)


def composed(
    name: str, settings: Mapping[str, Any], *, directory: str | PathLike[str] | None = None
) -> DictConfig:
    """Compose and check the configuration of a command from Python values.

    Args:
        name: The file in `config_dir()`, without `.yaml`.
        settings: As `overrides_of` takes them.
        directory: Folder with YAML files of your own (`--config-dir`).

    Raises:
        ConfigError: With the first problem.
    """
    check_packages()
    folders = [config_dir(), *([Path(directory)] if directory else [])]
    overrides = overrides_of(settings, groups=set().union(*map(group_names, folders)))
    cfg = compose_overrides(name, overrides, directory=fspath(directory) if directory else None)
    for message in unread_overrides(cfg, overrides):
        log.warning(message)
    check_config(cfg)
    return cfg


def compose_overrides(
    name: str, overrides: list[str], *, directory: str | None = None, folder: Path | None = None
) -> DictConfig:
    """Compose a configuration, see `compose_accepted`."""
    return compose_accepted(name, overrides, directory=directory, folder=folder)[0]


def compose_accepted(
    name: str, overrides: list[str], *, directory: str | None = None, folder: Path | None = None
) -> tuple[DictConfig, dict[str, str]]:
    """Compose a configuration.

    A mapping whose keys are the user's takes any key without a `+`, and `{}` removes all of its keys.

    Args:
        name: The file in `folder`, without `.yaml`.
        overrides: As on the command line.
        directory: Folder with YAML files of your own (`--config-dir`).
        folder: The folder of the configuration; None for `config_dir()`.

    Returns:
        The configuration; and the overrides that Hydra takes in place of some of those given.

    Raises:
        ConfigError: Hydra, OmegaConf or YAML does not accept them.
    """
    folder, overrides = folder or config_dir(), with_environment(overrides, command=name)
    replaced: dict[str, str] = {}
    with initialize_config_dir(str(folder), version_base="1.3"):
        while True:
            lines = [*searched(directory), *(replaced.get(line, line) for line in overrides)]
            try:
                cfg = _composed(name, lines, folder=folder)
            except _MissingKey as error:
                replaced |= _with_new_key(error, name, lines, folder=folder)
                continue
            emptied = _emptied(cfg, lines)
            if not emptied:
                return with_environments(cfg, partial(_of_file, directory, folder)), replaced
            replaced |= emptied


def _of_file(directory: str | None, folder: Path, overrides: list[str]) -> DictConfig:
    """Compose a run's configuration inside of another composition."""
    return _composed("fit", [*searched(directory), *overrides], folder=folder)


class _MissingKey(Exception):
    """No file of the configuration has the key of an override.

    Args:
        key: Its full name.
        message: Hydra's error in one line.
    """

    def __init__(self, key: str, message: str) -> None:
        self.key, self.message = key, message


def _composed(name: str, overrides: list[str], *, folder: Path) -> DictConfig:
    # Hydra takes an empty list for no option at all
    emptied = [line for line in overrides if line.partition("=")[2].replace(" ", "") == "[]"]
    _check_group_options(emptied, folder=folder)
    try:
        return compose(name, overrides=overrides)
    except Exception as error:  # of Hydra, OmegaConf or YAML
        from ragen_pl.config.hydra_errors import missing_key, translated

        if key := missing_key(error):
            raise _MissingKey(key, translated(error)) from error
        if "Config group override must be" in str(error):
            _check_group_options(overrides, folder=folder)
        raise ConfigError(translated(error)) from error


def _with_new_key(
    missing: _MissingKey, name: str, lines: list[str], *, folder: Path
) -> dict[str, str]:
    """Return overrides that add a key that no file has, where a class takes it or a mapping whose keys are the user's.

    Raises:
        ConfigError: It is not; with the nearest key, or with the way to add it.
    """
    key, added, hint = missing.key, {}, ""
    groups = group_names(folder)
    for line in lines:
        choice, _, value = line.partition("=")
        if choice in groups and key_of(line) == key and not value.startswith("{"):
            raise ConfigError(
                f"{line}: python -m ragen_pl.{name} has no group {choice}; --help shows its groups and keys"
            )
        place, _, value = line.partition("=")
        place = place.replace("/", ".")
        is_above = f"{key}.".startswith(f"{place}.") and value.startswith("{")
        if is_above or f"{place}.".startswith(f"{key}."):
            added[line] = f"++{place}={value}"
            hint = f"; a new one needs +{key}=…"
    others = [line for line in lines if line not in added and line != f"~{key}"]
    if others == lines:
        raise ConfigError(missing.message) from missing.__cause__
    try:
        cfg = _composed(name, [*others, *added.values()], folder=folder)
    except _MissingKey as other:
        return _with_new_key(other, name, [*others, *added.values()], folder=folder)
    parent, _, own = key.rpartition(".")
    names = [str(one) for one in OmegaConf.select(cfg, parent) or cfg if one != own]
    if takes_argument(cfg, key):
        return added
    if takes_any_key(cfg, key):
        before = OmegaConf.select(_composed(name, others, folder=folder), parent) or {}
        if not did_you_mean(own, map(str, before)):
            return added
    if did_you_mean(own, names):
        raise ConfigError(unknown_key(key, names))
    check_config(cfg)
    keys = [other for other, _ in leaves(cfg) if not f"{other}.".startswith(f"{key}.")]
    raise ConfigError(f"{unknown_key(key, names, keys=keys)}{hint}")


def _emptied(cfg: DictConfig, lines: list[str]) -> dict[str, str]:
    """Return overrides that set a mapping to null, for those that give it no keys, which Hydra would add to its own.

    Raises:
        ConfigError: The mapping must not be null.
    """
    emptied = {}
    for line in lines:
        key = key_of(line)
        if line.partition("=")[2].replace(" ", "") == "{}" and OmegaConf.select(cfg, key):
            if problem(annotation_at(cfg, key), None) is not None:
                first = next(iter(OmegaConf.select(cfg, key)))
                raise ConfigError(
                    f"{line}: an empty mapping changes nothing of {key}; give keys, such as {key}.{first}=…"
                )
            emptied[line] = f"{key}=null"
    return emptied


def group_names(folder: Path) -> set[str]:
    """Return the names of a configuration folder's groups, such as `env` and `rollout/engine`."""
    return {file.parent.relative_to(folder).as_posix() for file in folder.rglob("*.yaml")} - {"."}


def _check_group_options(overrides: list[str], *, folder: Path) -> None:
    """Refuse an override that gives a group a value, and name it. Hydra's own error does not."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        options = sorted(file.stem for file in (folder / key).glob("*.yaml")) if key else []
        if options and value.strip("'") not in options:
            raise ConfigError(f"{override}: {key} is one of {', '.join(options)}")
