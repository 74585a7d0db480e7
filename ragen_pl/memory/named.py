"""Which models are planned: pretrained ones, of which some are known by their sizes, so that no hub has to be asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hydra.utils import get_object

from ragen_pl.models.build import load_pretrained

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PretrainedConfig


def is_pretrained(cfg: DictConfig) -> bool:
    """Return whether the run's model is loaded, and not built from its config, which is small."""
    return get_object(cfg.model.build._target_) is load_pretrained


def named_config(model: Mapping[str, Any]) -> PretrainedConfig:
    """Return the transformers config of a named model.

    Args:
        model: The node `model` of a config as plain dictionaries: `size`, the shared `config` and, by size, what
            differs from it.
    """
    from transformers import AutoConfig

    config: PretrainedConfig = AutoConfig.for_model(
        **_merged(model["config"], model["sizes"][model["size"]])
    )
    return config


def _merged(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(shared)
    for name, value in own.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if both else value
    return merged
