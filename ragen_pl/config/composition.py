"""Composition of a configuration from overrides, with errors in one line."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from ragen_pl.config.check import check_config, leaves, unknown_key
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.hydra_errors import missing_key, translated
from ragen_pl.config.overrides import overrides_of
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
    folder = folder or config_dir()
    with initialize_config_dir(str(folder), version_base="1.3"):
        cfg = _composed(name, [*searched(directory), *overrides], folder=folder)
    _check_empty(cfg, overrides)
    return cfg


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


def _composed(name: str, overrides: list[str], *, folder: Path) -> DictConfig:
    try:
        return compose(name, overrides=overrides)
    except Exception as error:  # of Hydra, OmegaConf or YAML
        if key := missing_key(error):
            _refuse_key(key, name, overrides, folder=folder)
        if "Config group override must be" in str(error):
            _check_group_options(overrides, folder=folder)
        raise ConfigError(translated(error)) from error


def _refuse_key(key: str, name: str, overrides: list[str], *, folder: Path) -> None:
    """Refuse a key of an override that no file has: its class may know it, or one like it.

    Raises:
        ConfigError: with the nearest key, or with the way to add it.
    """
    added, hint = [], ""
    for line in overrides:
        place, _, value = line.partition("=")
        place = place.replace("/", ".")
        is_above = f"{key}.".startswith(f"{place}.") and value.startswith("{")
        if is_above or f"{place}.".startswith(f"{key}."):
            added.append(f"++{place}={value}")
            hint = f"; a new one needs +{key}=…"
        elif place != f"~{key}":
            added.append(line)
    if added == overrides:
        return
    cfg = _composed(name, added, folder=folder)
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
