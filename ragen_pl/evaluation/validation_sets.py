"""The validation sets of an evaluation: the environment's settings, each validation set's own on top."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

OWN = ("episodes", "key", "options")
"""Settings of a validation set that are not its environment's."""


@dataclass(frozen=True, slots=True)
class ValidationSettings:
    """A named validation set: what is played, how many starts, and what draws them."""

    name: str
    env: dict[str, Any]
    episodes: int
    key: str = "held_out"
    options: dict[str, Any] | None = None

    def set_aside(self, source: DictConfig) -> int:
        """Return how many of its starts training has set aside: those of its own validation set in its own environment."""
        own = (
            self.key == "held_out"
            and not self.options
            and environment(self.env) == source.environment
        )
        return min(source.held_out, self.episodes) if own else 0


def validation_settings(cfg: DictConfig) -> list[ValidationSettings]:
    """Return the config's validation sets in order; null ones are left out.

    A validation set's `kwargs` are merged into the environment's, all other settings replace the environment's.
    """
    env = _plain(cfg.env)
    found = []
    for name, node in (cfg.validation_sets or {}).items():
        if node is None:
            continue
        own = _plain(node)
        changes = {key: value for key, value in own.items() if key not in OWN}
        kwargs = {**(env.get("kwargs") or {}), **(changes.pop("kwargs", None) or {})}
        found.append(
            ValidationSettings(
                name=str(name),
                env={**env, **changes, "kwargs": kwargs},
                episodes=own.get("episodes") or cfg.validation.episodes,
                key=own.get("key") or "held_out",
                options=own.get("options"),
            )
        )
    return found


def environment(env: Mapping[str, Any]) -> str:
    """Return what decides an environment's starts, as text."""
    kwargs = sorted((env.get("kwargs") or {}).items())
    return f"{env.get('target')} {kwargs}"


def _plain(node: Any) -> dict[str, Any]:
    plain: Mapping[str, Any] = OmegaConf.to_container(node, resolve=True)  # type: ignore[assignment]
    return dict(plain)
