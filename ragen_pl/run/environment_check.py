"""Whether an environment keeps the protocol, found out by playing its first turn before a model is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ragen_pl.config.errors import ConfigError, config_errors
from ragen_pl.rollout.environments import EnvironmentManager, EnvironmentSlot, EpisodeSpec
from ragen_pl.rollout.parsing import ParsedResponse
from ragen_pl.trajectory import Observation

_SEED = 0
_LOOKS = 32  # of a player, which may play in several ways by chance
_RESERVED = ("||", "<", ">")  # of the response's form


def probe(cfg: DictConfig) -> None:
    """Make the config's environment, begin an episode, let every player look at it and take a step.

    Raises:
        ConfigError: it breaks the protocol; with what was found, what is expected and the mend.
    """
    settings = OmegaConf.to_container(cfg.env, resolve=True)
    assert isinstance(settings, dict)
    managed = {str(key): value for key, value in settings.items() if key not in ("name", "visual")}
    manager = EnvironmentManager(**managed)
    said = f"env.target={cfg.env.target}"
    slots = [manager.make() for _ in range(2)]
    for env in slots:
        _check_members(env, said=said)
    first, again = (_begin(manager, env, said=said) for env in slots)
    if not _same(first.observation, again.observation):
        raise ConfigError(
            f"{said}: two resets with seed {_SEED} began differently; draw from self.np_random only"
        )
    _check_images(first, cfg, said=said)
    _check_state_key(first, cfg, said=said)
    for key, scripted_policy in _players(cfg):
        _check_player(first, scripted_policy, key=key)
    _check_step(manager, first, said=said)
    for slot in (first, again):
        slot.env.close()


def _check_members(env: object, *, said: str) -> None:
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(
            f"{said}: found a {type(env).__name__}, expected a gymnasium.Env; derive it from that"
        )
    environment: Any = env.unwrapped
    space = getattr(environment, "action_space", None)
    if not isinstance(space, spaces.Discrete):
        raise ConfigError(f"{said}: found action_space={space}, expected Discrete(n); set it")
    names = getattr(environment, "action_names", None)
    if not isinstance(names, Sequence) or isinstance(names, str) or len(names) != space.n:
        raise ConfigError(
            f"{said}: found action_names={names!r}, expected a name for each of {space.n} actions; "
            'set action_names = ("Up", …)'
        )
    plain = [str(name).strip().casefold() for name in names]
    if len(set(plain)) < len(plain) or not all(plain):
        raise ConfigError(
            f"{said}: found action_names={tuple(names)!r}, expected names that differ; case does not count"
        )
    if any(mark in name for name in plain for mark in _RESERVED):
        raise ConfigError(
            f"{said}: found action_names={tuple(names)!r}, expected none of {', '.join(_RESERVED)} in them"
        )


def _begin(
    manager: EnvironmentManager, env: gymnasium.Env[Any, Any], *, said: str
) -> EnvironmentSlot:
    with config_errors(f"{said}: reset(seed={_SEED}, options=None) raised"):
        found: Any = env.reset(seed=_SEED, options=None)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        raise ConfigError(
            f"{said}: reset returned {_kind(found)}, expected (observation, info); return both"
        )
    slot = EnvironmentSlot(env=env, spec=EpisodeSpec(group=0, member=0, seed=_SEED))
    with config_errors(said):
        manager.observe(slot, found[0])
    if not isinstance(slot.state_description, str | None):
        raise ConfigError(
            f"{said}: describe() returned {_kind(slot.state_description)}, expected a str"
        )
    return slot


def _check_images(slot: EnvironmentSlot, cfg: DictConfig, *, said: str) -> None:
    shows = bool(slot.observation and slot.observation.images)
    if shows != bool(cfg.env.get("visual", shows)):
        found, value = ("an image", "true") if shows else ("no image", "false")
        raise ConfigError(
            f"{said}: found {found} in its observation; set env.visual={value} "
            f"model={'small_vlm' if shows else 'small_lm'}"
        )


def _check_state_key(slot: EnvironmentSlot, cfg: DictConfig, *, said: str) -> None:
    if not OmegaConf.select(cfg, "validation.held_out"):
        return
    key = getattr(slot.env.unwrapped, "state_key", None)
    if key is None or not isinstance(key(), str):
        raise ConfigError(
            f"{said}: has no state_key() that returns a str, which validation.held_out=true needs; "
            "write one, or set validation.held_out=false"
        )


def _players(cfg: DictConfig) -> list[tuple[str, DictConfig]]:
    found = OmegaConf.select(cfg, "validation.baselines") or {}
    scripted_policies = [
        (f"validation.baselines.{name}", scripted_policy)
        for name, scripted_policy in found.items()
        if scripted_policy
    ]
    if OmegaConf.select(cfg, "warm_start.enabled"):
        scripted_policies.append(("warm_start.demonstrator", cfg.warm_start.demonstrator))
    return scripted_policies


def _check_player(slot: EnvironmentSlot, scripted_policy: DictConfig, *, key: str) -> None:
    with config_errors(
        key, hint=f"give the environment what it asks for, or another player ({key}=…)"
    ):
        chooser, rng = instantiate(scripted_policy), np.random.default_rng(_SEED)
        actions = [chooser.act(slot.env, rng) for _ in range(_LOOKS)]
        last = len(slot.action_names) - 1
        if wrong := [action for action in actions if not 0 <= action <= last]:
            raise ValueError(f"chose action {wrong[0]}, expected 0 to {last}")


def _check_step(manager: EnvironmentManager, slot: EnvironmentSlot, *, said: str) -> None:
    with config_errors(f"{said}: step(0) raised"):
        found: Any = slot.env.step(0)
    if not (isinstance(found, tuple) and len(found) == 5 and isinstance(found[4], dict)):
        raise ConfigError(
            f"{said}: step returned {_kind(found)}, expected (observation, reward, terminated, "
            "truncated, info)"
        )
    slot.env.reset(seed=_SEED, options=None)
    result = manager.step([slot], [ParsedResponse(actions=[0])])[0]
    if result.error:
        raise ConfigError(f"{said}: {result.error.partition(': ')[2]}")


def _same(one: Observation | None, other: Observation | None) -> bool:
    if one is None or other is None:
        return one is other
    images = zip(one.images, other.images, strict=True)
    return one.text == other.text and all(np.array_equal(*pair) for pair in images)


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return f"a {type(value).__name__}"
