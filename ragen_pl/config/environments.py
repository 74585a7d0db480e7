"""The environments of a configuration: one, or the several of `env=mixture`, each with settings of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ragen_pl.base.constraints import problem
from ragen_pl.config.errors import ConfigError
from ragen_pl.config.nodes import plain

Compose = Callable[[list[str]], DictConfig]
"""Composes a run's configuration from overrides."""

_KEY = "env.environments"
# keys of an environment's file, beside the node `env`, that an environment of a mixture has of its own
_OWN = {
    "validation": ("episodes", "held_out", "baselines"),
    "warm_start": ("episodes", "stages", "demonstrator"),
}


def is_mixture(env: DictConfig) -> bool:
    """Return whether the node `env` has several environments."""
    # also without a value
    return "environments" in list(env)


def with_environments(cfg: DictConfig, compose: Compose) -> DictConfig:
    """Return a composed configuration whose environments of a mixture have the settings of their files.

    An entry is a share, or changes to the settings of the file `conf/env/<file>.yaml`, by default that of its name. It
    then has the keys of the node `env`, `max_response_tokens`, `curriculum` and `rewards`, and of the nodes
    `validation` and `warm_start` what belongs to an environment. A configuration with one environment is returned as it
    is.

    Args:
        cfg: The configuration.
        compose: Composes a run's configuration with other overrides.

    Raises:
        ConfigError: There is no such file, or an entry is neither a share nor settings.
    """
    env = cfg.get("env")
    if env is None or not is_mixture(env) or OmegaConf.is_missing(env, "environments"):
        return cfg
    given = OmegaConf.to_container(env.environments, resolve=False)
    if not isinstance(given, dict) or not given:
        raise ConfigError(
            f"{_KEY}={given}: expected a share of each environment; set '{_KEY}={{frozenlake: 1, bandit: 1}}'"
        )
    rewards = _plain(OmegaConf.select(cfg, "algorithm.rewards") or {})
    own = {str(name): _whole(str(name), entry, rewards, compose) for name, entry in given.items()}
    cfg = cfg.copy()
    OmegaConf.set_struct(cfg, False)
    cfg.env.environments = own
    # the context must have room for each
    cfg.rollout.max_response_tokens = max(one["max_response_tokens"] for one in own.values())
    return cfg


def _whole(name: str, entry: Any, rewards: Any, compose: Compose) -> dict[str, Any]:
    """Return all settings of an environment from its entry and the run's reward functions."""
    key = f"{_KEY}.{name}"
    if problem(float, entry) is None:
        entry = {"share": entry}
    if not isinstance(entry, dict):
        raise ConfigError(
            f"{key}={entry}: expected a share, or settings such as {{share: 1, max_turns: 8}}"
        )
    file = str(entry.get("file", name))
    try:
        cfg = compose([f"env={file}"])
        if is_mixture(cfg.env):
            raise ConfigError(f"is a mixture itself; list its environments in {_KEY}")
        if "target" in entry:
            OmegaConf.update(cfg, "env.target", entry["target"])
        env = plain(cfg.env, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(
            f"{key}.{error.key} has no value; set '{_KEY}={{{name}: {{file: {file}, {error.key}: …}}}}'"
        ) from error
    except (ConfigError, OmegaConfBaseException) as error:
        raise ConfigError(f"{key}.file={file}: {str(error).splitlines()[0]}") from error
    settings = {
        "file": file,
        "share": 1.0,
        **{one: value for one, value in env.items() if one != "name"},
        "max_response_tokens": cfg.rollout.max_response_tokens,
        "curriculum": _plain(cfg.curriculum),
        "rewards": rewards,
        **{node: {one: _plain(cfg[node].get(one)) for one in keys} for node, keys in _OWN.items()},
    }
    return plain(OmegaConf.merge(settings, entry), resolve=False)


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def environment_nodes(env: DictConfig) -> dict[str, DictConfig]:
    """Return the node `env` of each environment by its name; of a run with one environment the node itself."""
    return dict(env.environments) if is_mixture(env) else {str(env.get("name", "")): env}


def environment_configs(cfg: DictConfig) -> dict[str, DictConfig]:
    """Return the configuration of a run in each environment by its name, as if it were the only one.

    That of a run with one environment is the configuration itself.
    """
    if not is_mixture(cfg.env):
        return {str(cfg.env.name): cfg}
    return {name: _alone(cfg, name, own) for name, own in environment_nodes(cfg.env).items()}


def env_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an environment of a mixture that the node `env` of a run with it alone has."""
    others = ("file", "share", "max_response_tokens", "curriculum", "rewards", *_OWN)
    return {key: value for key, value in given.items() if key not in others}


def _alone(cfg: DictConfig, name: str, own: DictConfig) -> DictConfig:
    # interpolations stay, and are those of the environment's own nodes
    alone: Any = OmegaConf.to_container(cfg, resolve=False)
    given: Any = OmegaConf.to_container(own, resolve=False)
    alone["env"] = {"name": name, **env_settings(given)}
    alone["curriculum"] = given["curriculum"]
    alone["rollout"]["max_response_tokens"] = given["max_response_tokens"]
    alone["algorithm"]["rewards"] = given["rewards"]
    for node, keys in _OWN.items():
        alone[node] |= {key: given[node][key] for key in keys}
    return OmegaConf.create(alone)
