"""Checks of an environment before a model is built: it is made, and its first turn is played."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import Error
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf

from ragen_pl.config.errors import ConfigError, config_errors, in_one_line
from ragen_pl.rollout.environment_process import environment_maker
from ragen_pl.rollout.environments import (
    EnvironmentManager,
    EnvironmentMembers,
    EnvironmentSlot,
    EpisodeSpec,
)
from ragen_pl.rollout.parsing import ParsedResponse
from ragen_pl.trajectory import Observation

# keys of env that are for people and models
_DESCRIPTIONS = ("name", "visual", "words")
_SEED = 0
# of each scripted policy: it may choose by chance
_ACTIONS = 32
# random episodes and their steps that are played
_EPISODES, _STEPS = 4, 6
# steps in a row whose observations contain the one before
_GROWS = 4
_EPSILON = 1e-6
# free text for an environment that draws none
_TEXT = "probe"
# marks of a response's form
_RESERVED = ("||", "<", ">")


def make_environment(env: DictConfig) -> gymnasium.Env[Any, Any]:
    """Make an environment from the node `env` of a config.

    Raises:
        ConfigError: it does not exist or does not take its settings.
    """
    settings = OmegaConf.to_container(env.kwargs, resolve=True) if env.get("kwargs") else {}
    assert isinstance(settings, dict)
    kwargs = {str(name): value for name, value in settings.items()}
    with config_errors(f"env.target={env.target}"):
        make = environment_maker(
            str(env.target), process=bool(env.get("process")), memory_mb=env.get("memory_mb")
        )
    try:
        return make(**kwargs)
    except (Error, ModuleNotFoundError) as error:
        raise ConfigError(
            f"env.target={env.target}: {in_one_line(error)}; give a gymnasium id such as "
            "envs:ragen/FrozenLake-v0, or a class path such as my_package.my_module.MyEnv"
        ) from error
    except ImportError as error:  # an adapter names the extra that installs its library
        raise ConfigError(f"env.target={env.target}: {in_one_line(error)}") from error
    except Exception as error:  # an environment's constructor may raise anything
        text = str(error).split(" was raised from the environment creator")[0]
        raise ConfigError(f"env.kwargs of {env.target}: {text}") from error


def manager_settings(env: DictConfig) -> dict[str, Any]:
    """Return the settings of the environment manager: those of the node `env` without what describes the task."""
    settings = OmegaConf.to_container(env, resolve=True)
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items() if key not in _DESCRIPTIONS}


def check_environment(cfg: DictConfig) -> gymnasium.Env[Any, Any]:
    """Make the config's environment, play its first turn and return it unwrapped.

    Scripted policies choose actions in it, and the curriculum's stages are tried.

    Raises:
        ConfigError: it breaks the protocol; with what was found, what was expected and the remedy.
    """
    place = f"env.target={cfg.env.target}"
    env = make_environment(cfg.env)
    _check_members(env, place=place)
    manager = EnvironmentManager(**manager_settings(cfg.env))
    first, second = (_reset(manager, env, place=place) for _ in range(2))
    if not _same(first.observation, second.observation):
        raise ConfigError(
            f"{place}: two resets with seed {_SEED} began differently; draw from self.np_random only"
        )
    _check_images(first, cfg, place=place)
    _check_state_key(first, cfg, place=place)
    for key, policy in _scripted_policies(cfg):
        _check_scripted_policy(first, policy, key=key)
    _check_step(manager, first, place=place)
    _check_episodes(manager, env, cfg, place=place)
    _check_stages(env, OmegaConf.select(cfg, "curriculum.stages"))
    env.close()
    return env.unwrapped


def _check_members(env: object, *, place: str) -> None:
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(
            f"{place}: found a {type(env).__name__}, expected a gymnasium.Env; derive it from that"
        )
    environment: Any = env.unwrapped
    space = getattr(environment, "action_space", None)
    if isinstance(space, spaces.Text):
        return
    if not isinstance(space, spaces.Discrete):
        raise ConfigError(
            f"{place}: found action_space={space}, expected Discrete(n) for named actions or Text(max_length) for "
            "free text; set it"
        )
    names = getattr(environment, "action_names", None)
    if not isinstance(names, Sequence) or isinstance(names, str) or len(names) != space.n:
        raise ConfigError(
            f"{place}: found action_names={names!r}, expected a name for each of {space.n} actions; "
            'set action_names = ("Up", …)'
        )
    plain = [str(name).strip().casefold() for name in names]
    if len(set(plain)) < len(plain) or not all(plain):
        raise ConfigError(
            f"{place}: found action_names={tuple(names)!r}, expected names that differ; case does not count"
        )
    if any(mark in name for name in plain for mark in _RESERVED):
        raise ConfigError(
            f"{place}: found action_names={tuple(names)!r}, expected none of {', '.join(_RESERVED)} in them"
        )


def _reset(
    manager: EnvironmentManager, env: gymnasium.Env[Any, Any], *, place: str, seed: int = _SEED
) -> EnvironmentSlot:
    with config_errors(f"{place}: reset(seed={seed}, options=None) raised"):
        result: Any = env.reset(seed=seed, options=None)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ConfigError(
            f"{place}: reset returned {_kind(result)}, expected (observation, info); return both"
        )
    slot = EnvironmentSlot(env=env, spec=EpisodeSpec(group=0, member=0, seed=seed))
    with config_errors(place):
        manager.observe(slot, result[0])
    description: Any = slot.state_description
    if not isinstance(description, str | None):
        raise ConfigError(f"{place}: describe() returned {_kind(description)}, expected a str")
    return slot


def _check_images(slot: EnvironmentSlot, cfg: DictConfig, *, place: str) -> None:
    shows = bool(slot.observation and slot.observation.images)
    if shows != bool(cfg.env.get("visual", shows)):
        content, value = ("an image", "true") if shows else ("no image", "false")
        raise ConfigError(
            f"{place}: found {content} in its observation; set env.visual={value} "
            f"model={'small_vlm' if shows else 'small_lm'}"
        )


def _check_state_key(slot: EnvironmentSlot, cfg: DictConfig, *, place: str) -> None:
    if not OmegaConf.select(cfg, "validation.held_out"):
        return
    key = getattr(slot.env.unwrapped, "state_key", None)
    if key is None or not isinstance(key(), str):
        raise ConfigError(
            f"{place}: has no state_key() that returns a str, which validation.held_out=true needs; "
            "write one, or set validation.held_out=false"
        )


def _scripted_policies(cfg: DictConfig) -> list[tuple[str, DictConfig]]:
    baselines = OmegaConf.select(cfg, "validation.baselines") or {}
    policies = [
        (f"validation.baselines.{name}", policy) for name, policy in baselines.items() if policy
    ]
    if OmegaConf.select(cfg, "warm_start.enabled"):
        policies.append(("warm_start.demonstrator", cfg.warm_start.demonstrator))
    return policies


def _check_scripted_policy(slot: EnvironmentSlot, settings: DictConfig, *, key: str) -> None:
    hint = f"give the environment what the policy needs, or choose another policy ({key}=…)"
    with config_errors(key, hint=hint):
        policy, rng = instantiate(settings), np.random.default_rng(_SEED)
        actions = [policy.act(slot.env, rng) for _ in range(_ACTIONS)]
        if wrong := [action for action in actions if not _is_action(action, slot)]:
            raise ValueError(f"chose action {wrong[0]!r}, expected {_expected_action(slot)}")


def _is_action(action: int | str, slot: EnvironmentSlot) -> bool:
    if slot.action_names is None:
        return isinstance(action, str)
    return not isinstance(action, str) and 0 <= action < len(slot.action_names)


def _expected_action(slot: EnvironmentSlot) -> str:
    return "a text" if slot.action_names is None else f"0 to {len(slot.action_names) - 1}"


def _check_stages(env: gymnasium.Env[Any, Any], stages: ListConfig | None) -> None:
    """Check that the environment takes the reset options of each stage, and name one that is wrong by itself."""
    plain: Any = OmegaConf.to_container(stages, resolve=True) if stages else []
    for stage, options in enumerate(plain):
        key = f"curriculum.stages.{stage}"
        with config_errors(f"{key}={options}"):
            try:
                env.reset(seed=_SEED, options=options or None)
            except Exception:
                for name, value in options.items():
                    with config_errors(f"{key}.{name}={value}"):
                        env.reset(seed=_SEED, options={name: value})
                raise


def _check_step(manager: EnvironmentManager, slot: EnvironmentSlot, *, place: str) -> None:
    named = slot.action_names is not None
    action = 0 if named else _drawn_action(slot.members, np.random.default_rng(_SEED))
    with config_errors(f"{place}: step({action!r}) raised"):
        output: Any = slot.env.step(action)
    if not (isinstance(output, tuple) and len(output) == 5 and isinstance(output[4], dict)):
        raise ConfigError(
            f"{place}: step returned {_kind(output)}, expected (observation, reward, terminated, "
            "truncated, info)"
        )
    slot.env.reset(seed=_SEED, options=None)
    result = manager.step([slot], [ParsedResponse(actions=[action])])[0]
    if result.error:
        raise ConfigError(f"{place}: {result.error.partition(': ')[2]}")


def _drawn_action(members: EnvironmentMembers, rng: np.random.Generator) -> int | str:
    """Return an action that the environment draws; of free texts any, where it draws none."""
    try:
        return members.random_action(rng)
    except TypeError:
        return _TEXT


def _check_episodes(
    manager: EnvironmentManager, env: gymnasium.Env[Any, Any], cfg: DictConfig, *, place: str
) -> None:
    """Play the beginnings of random episodes twice: the second time must be equal to the first."""
    images: list[np.ndarray] = []
    for seed in range(_EPISODES):
        first, second = (_steps(manager, env, seed=seed, place=place) for _ in range(2))
        for number, (step, again) in enumerate(zip_longest(first, second)):
            ended = step is None or again is None
            if ended or not _same(step[0], again[0]) or step[1] != again[1]:
                raise ConfigError(
                    f"{place}: two episodes with seed {seed} and equal actions differ after {number} steps; draw from "
                    "self.np_random only, and keep nothing from one episode to the next"
                )
        images += [image for observation, _ in first for image in observation.images]
        texts = [observation.text for observation, _ in first]
        if manager.max_turns > _GROWS and OmegaConf.select(cfg, "context.window") == "all":
            _check_growth(texts, place=place)
    if images and all(image.min() == image.max() for image in images):
        raise ConfigError(
            f"{place}: each of its {len(images)} images has one colour only; check its renderer (a second OpenGL "
            "context may draw nothing)"
        )
    if len(images) > _EPISODES and all(np.array_equal(images[0], image) for image in images):
        raise ConfigError(f"{place}: all of its {len(images)} images are equal; check its renderer")


def _check_growth(texts: Sequence[str], *, place: str) -> None:
    grows = [
        bool(text) and text in following and len(following) > len(text)
        for text, following in pairwise(texts)
    ]
    if len(grows) >= _GROWS and all(grows):
        raise ConfigError(
            f"{place}: each observation contains the one before it ({len(texts[0])} to {len(texts[-1])} characters in "
            f"{len(grows)} steps), and context.window=all repeats them all; return what is new, or set "
            "context.window=1"
        )


def _steps(
    manager: EnvironmentManager,
    env: gymnasium.Env[Any, Any],
    *,
    seed: int,
    place: str,
) -> list[tuple[Observation, float]]:
    """Return observations and rewards of the beginning of a random episode."""
    slot, rng = _reset(manager, env, place=place, seed=seed), np.random.default_rng(seed)
    members = slot.members
    assert slot.observation is not None
    steps = [(slot.observation, 0.0)]
    for _ in range(min(_STEPS, manager.max_turns)):
        action = _drawn_action(members, rng)
        with config_errors(f"{place}: step({action!r}) raised"):
            raw, reward, terminated, truncated, _ = env.step(action)
        with config_errors(place):
            manager.observe(slot, raw)
        low, high = members.reward_range or (-math.inf, math.inf)
        if not low - _EPSILON <= float(reward) <= high + _EPSILON:
            raise ConfigError(
                f"{place}: step({action!r}) returned reward {reward}, outside of its reward_range=({low:g}, {high:g}); "
                "correct one of them"
            )
        steps.append((slot.observation, float(reward)))
        if terminated or truncated:
            break
    return steps


def _same(first: Observation | None, second: Observation | None) -> bool:
    if first is None or second is None:
        return first is second
    images = zip(first.images, second.images, strict=True)
    return first.text == second.text and all(np.array_equal(*pair) for pair in images)


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return f"a {type(value).__name__}"
