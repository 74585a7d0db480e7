"""Composition of a configuration from overrides, with errors in one line."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from ragen_pl.config.check import check_config, leaves, takes_argument, unknown_key
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.hydra_errors import missing_key, translated
from ragen_pl.config.overrides import overrides_of, with_environment
from ragen_pl.config.paths import check_packages, config_dir, searched
from ragen_pl.constraints import did_you_mean


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
    check_config(cfg)
    return cfg


def compose_overrides(
    name: str, overrides: list[str], *, directory: str | None = None, folder: Path | None = None
) -> DictConfig:
    """Compose a configuration.

    Args:
        name: The file in `folder`, without `.yaml`.
        overrides: As on the command line.
        directory: Folder with YAML files of your own (`--config-dir`).
        folder: The folder of the configuration; None for `config_dir()`.

    Raises:
        ConfigError: Hydra, OmegaConf or YAML does not accept them.
    """
    overrides = with_environment(overrides, command=name)
    return compose_completed(name, overrides, directory=directory, folder=folder)[0]


def compose_completed(
    name: str, overrides: list[str], *, directory: str | None = None, folder: Path | None = None
) -> tuple[DictConfig, list[str]]:
    """Compose a configuration; return it with the overrides, `++` before those that add an argument of a class.

    Args:
        name: The file in `folder`, without `.yaml`.
        overrides: As on the command line. An argument that no file has needs no `+` where the environment's class
            takes it.
        directory: Folder with YAML files of your own (`--config-dir`).
        folder: The folder of the configuration; None for `config_dir()`.

    Raises:
        ConfigError: Hydra, OmegaConf or YAML does not accept them.
    """
    folder, first = folder or config_dir(), searched(directory)
    with initialize_config_dir(str(folder), version_base="1.3"):
        cfg, completed = _composed(name, [*first, *overrides], folder=folder)
    _check_empty(cfg, overrides)
    return cfg, completed[len(first) :]


def _check_empty(cfg: DictConfig, overrides: list[str]) -> None:
    """Refuse an empty mapping for a node: Hydra merges mappings, so it changes nothing."""
    for line in overrides:
        key, _, value = line.lstrip("+").partition("=")
        node = key.partition("@")[0].replace("/", ".")
        if value.replace(" ", "") == "{}" and (kept := OmegaConf.select(cfg, node)):
            first = next(iter(kept))
            raise ConfigError(
                f"{line}: an empty mapping changes nothing of {node}; give keys, such as {node}.{first}=…"
            )


def _composed(name: str, overrides: list[str], *, folder: Path) -> tuple[DictConfig, list[str]]:
    try:
        return compose(name, overrides=overrides), overrides
    except Exception as error:  # of Hydra, OmegaConf or YAML
        if key := missing_key(error):
            added = _with_key(key, overrides)
            if added != overrides:
                cfg, completed = _composed(name, added, folder=folder)
                if takes_argument(cfg, key):
                    return cfg, completed
                _refuse_key(key, cfg, is_new=len(added) == len(overrides))
        if "Config group override must be" in str(error):
            _check_group_options(overrides, folder=folder)
        raise ConfigError(translated(error)) from error


def _with_key(key: str, overrides: list[str]) -> list[str]:
    """Return overrides that add a key where they set it, and none that deletes it."""
    added = []
    for line in overrides:
        place, _, value = line.partition("=")
        place = place.replace("/", ".")
        is_above = f"{key}.".startswith(f"{place}.") and value.startswith("{")
        if is_above or f"{place}.".startswith(f"{key}."):
            added.append(f"++{place}={value}")
        elif place != f"~{key}":
            added.append(line)
    return added


def _refuse_key(key: str, cfg: DictConfig, *, is_new: bool) -> None:
    """Refuse a key of an override that no file has: its class may know it, or one like it.

    Raises:
        ConfigError: with the nearest key, or with the way to add it.
    """
    hint = f"; a new one needs +{key}=…" if is_new else ""
    parent, _, own = key.rpartition(".")
    names = [str(other) for other in OmegaConf.select(cfg, parent) or cfg if other != own]
    if did_you_mean(own, names):
        raise ConfigError(unknown_key(key, names))
    check_config(cfg)
    keys = [other for other, _ in leaves(cfg) if other != key]
    raise ConfigError(f"{unknown_key(key, names, keys=keys)}{hint}")


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
