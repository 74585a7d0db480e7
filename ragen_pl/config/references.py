"""References between settings (`max_calls: ${env.max_turns}`), put back where only their values were kept.

A run's `config.yaml` and what `evaluate` takes over from it are plain values. A reference that is put back follows the
override of the setting that it names, as in the run's own command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ragen_pl.config.paths import config_dir

Place = tuple[str | int, ...]
"""Names of the nodes that lead to a setting."""


def references_in(cfg: DictConfig, *parts: str) -> dict[Place, str]:
    """Return the references in parts of a composed configuration, such as `env` or `rollout.engine`."""
    found: dict[Place, str] = {}
    for part in parts:
        node = OmegaConf.select(cfg, part)
        if isinstance(node, DictConfig):
            raw = OmegaConf.to_container(node, resolve=False)
            found |= dict(_references(raw, place=tuple(part.split("."))))
    return found


def references_of_environment(target: object, folders: Sequence[Path]) -> dict[Place, str]:
    """Return the references in the configuration files of an environment's class.

    Args:
        target: Class path or gymnasium id.
        folders: Folders of configurations besides the shipped one.
    """
    found: dict[Place, str] = {}
    groups = [folder / "env" for folder in (*folders, config_dir())]
    for file in _that_may_refer(
        [file for group in groups for file in sorted(group.glob("*.yaml"))]
    ):
        settings = _with_bases(file, groups)
        if OmegaConf.select(settings, "env.target") == target:
            raw = OmegaConf.to_container(settings, resolve=False)
            found |= dict(_references(raw, place=()))
    return found


def with_references(settings: Mapping[str, Any], references: Mapping[Place, str]) -> DictConfig:
    """Return settings with the references that give the values which they have.

    A reference is left out whose setting has another value, or that refers to something outside.
    """
    cfg = OmegaConf.create(dict(settings))
    for place, text in references.items():
        node, name = _node(cfg, place[:-1]), place[-1]
        if node is None or not _has(node, name):
            continue
        raw: Any = OmegaConf.to_container(node, resolve=False)
        value = _value(node, name)
        node[name] = text
        try:
            is_kept = _value(node, name) == value
        except OmegaConfBaseException:
            is_kept = False
        if not is_kept:
            node[name] = raw[name]
    return cfg


def _references(value: Any, *, place: Place) -> Iterator[tuple[Place, str]]:
    if isinstance(value, Mapping | list):
        for name, child in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _references(child, place=(*place, name))
    elif isinstance(value, str) and "${" in value:
        yield place, value


def _that_may_refer(files: Sequence[Path]) -> list[Path]:
    """Return the files that hold a reference, or name one that does. To parse all of them takes seconds."""
    texts = {file: file.read_text("utf-8") for file in files}
    names = {file.stem for file, text in texts.items() if "${" in text}
    while more := {
        file.stem
        for file, text in texts.items()
        if file.stem not in names and any(name in text for name in names)
    }:
        names |= more
    return [file for file in files if file.stem in names]


def _with_bases(file: Path, groups: Sequence[Path]) -> DictConfig:
    """Return the settings of a file over those of the files of its group that its defaults name."""
    own = OmegaConf.load(file)
    assert isinstance(own, DictConfig)
    names = [name for name in own.pop("defaults", []) if isinstance(name, str) and name != "_self_"]
    bases = [group / f"{name}.yaml" for name in names for group in groups]
    found = [_with_bases(base, groups) for base in bases if base.exists() and base != file]
    return OmegaConf.merge(*found, own)  # type: ignore[return-value]


def _node(cfg: DictConfig, place: Place) -> Any:
    """Return the mapping or list at a place, None where there is none."""
    node: Any = cfg
    for name in place:
        if not OmegaConf.is_config(node) or not _has(node, name):
            return None
        node = node[name]
    return node if OmegaConf.is_config(node) else None


def _value(node: Any, name: str | int) -> Any:
    """Return a setting as a plain value, references resolved."""
    value = node[name]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _has(node: DictConfig | ListConfig, name: str | int) -> bool:
    return (
        name in node if isinstance(node, DictConfig) else isinstance(name, int) and name < len(node)
    )
