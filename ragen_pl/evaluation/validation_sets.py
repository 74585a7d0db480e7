"""Settings of an evaluation's validation sets: those of the environment, changed by each validation set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ragen_pl.base.constraints import Count
from ragen_pl.config.nodes import plain
from ragen_pl.config.settings import keys_of


@dataclass(frozen=True, slots=True)
class ValidationSettings:
    """Settings of a validation set.

    Attributes:
        name: Name of the validation set.
        env: Settings of its environment.
        episodes: Number of initial states.
        key: Key that the seeds of the initial states are derived from.
        options: Options of each reset.
    """

    name: str
    env: dict[str, Any]
    episodes: Count
    key: str = "held_out"
    options: dict[str, Any] | None = None

    def set_aside(self, source: DictConfig) -> int:
        """Return how many of the initial states training held out.

        Training holds out those of its own validation set in its own environment.

        Args:
            source: Origin of the weights, as `resolve_settings` stores it.
        """
        same = self.key == "held_out" and not self.options
        if not same or environment_key(self.env) != source.environment:
            return 0
        return min(source.held_out, self.episodes)


def validation_settings(cfg: DictConfig) -> list[ValidationSettings]:
    """Return the config's validation sets in order, without those that are null.

    A validation set's `kwargs` are merged into the environment's. All its other settings replace the
    environment's, and settings that refer to them follow.
    """
    settings = []
    for name, node in (cfg.validation_sets or {}).items():
        if node is None:
            continue
        own = plain(node)
        not_of_environment = keys_of(ValidationSettings)
        changes = {key: value for key, value in own.items() if key not in not_of_environment}
        kwargs = changes.pop("kwargs", None) or {}
        env = _changed(cfg, changes)
        settings.append(
            ValidationSettings(
                name=str(name),
                env={**env, "kwargs": {**(env.get("kwargs") or {}), **kwargs}},
                episodes=own.get("episodes") or cfg.validation.episodes,
                key=own.get("key") or "held_out",
                options=own.get("options"),
            )
        )
    return settings


def environment_key(env: Mapping[str, Any]) -> str:
    """Return the settings that determine an environment's initial states, as text."""
    kwargs = sorted((env.get("kwargs") or {}).items())
    return f"{env.get('target')} {kwargs} {env.get('held_out_fraction')}"


def _changed(cfg: DictConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the environment with changes to some of them."""
    changed = cfg.copy()
    OmegaConf.set_struct(changed, False)
    for key, value in changes.items():
        changed.env[key] = value
    return plain(changed.env)
