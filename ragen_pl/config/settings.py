"""Read a node of the configuration into its settings class."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

Settings = TypeVar("Settings")


def read_settings(cls: type[Settings], node: DictConfig) -> Settings:
    """Return an object of a settings class with all its keys that a node has.

    A key that names a class by `_target_` is built.

    Args:
        cls: A dataclass, whose fields are keys of the node.
        node: The node; keys of other classes are left to them.

    Raises:
        ValueError: A value that the class does not take.
    """
    return cls(**{name: _value(node[name]) for name in keys_of(cls) if name in node})


def keys_of(cls: type[Any]) -> tuple[str, ...]:
    """Return the keys of a settings class."""
    return tuple(field.name for field in fields(cls))


def _value(value: Any) -> Any:
    return instantiate(value, _convert_="all") if OmegaConf.is_config(value) else value
