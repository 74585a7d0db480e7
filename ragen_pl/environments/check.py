"""Checks of an environment before a model is built: it is made, and its first turns are played."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ragen_pl.config.errors import ConfigError, config_errors
from ragen_pl.environments.calls import EnvironmentCalls, manager_settings
from ragen_pl.environments.manager import EnvironmentManager, EnvironmentSlot, EpisodeSpec
from ragen_pl.environments.members import EnvironmentMembers
from ragen_pl.machine import only_new_garbage, used_memory
from ragen_pl.trajectory import Observation

log = logging.getLogger(__name__)

_SEED = 0
# of each scripted policy: it may choose by chance
_ACTIONS = 32
# random episodes and their steps that are played
_EPISODES, _STEPS = 4, 6
# random episodes, or their steps, whose return is compared with that of invalid responses
_COMPARED, _COMPARED_STEPS = 16, 100
# steps in a row whose observations contain the one before
_GROWS = 4
# free text for an environment that draws none
_TEXT = "probe"
# marks of a response's form
_RESERVED = ("||", "<", ">")
# memory that each episode keeps, in bytes; the first episodes import libraries and fill caches
_KEPT, _FIRST_EPISODES = 4 * 2**20, 3


def check_environment(cfg: DictConfig) -> gymnasium.Env[Any, Any]:
    """Make the config's environment, play its first turns and return it closed and unwrapped.

    Scripted policies choose actions in it, and the stages of the curriculum and of the warm start are tried.

    Raises:
        ConfigError: it breaks the protocol; with what was found, what was expected and the remedy.
    """
    calls = EnvironmentCalls(cfg.env)
    try:
        env = calls.make()
        _Check(cfg, calls, env).run()
    finally:
        calls.close()
    return env.unwrapped


@dataclass(frozen=True, slots=True)
class _Moment:
    """Outcome of a step of an episode that is played twice."""

    observation: Observation
    reward: float
    state_key: str | None


class _Check:
    """The checks of one environment.

    Args:
        cfg: config of a run.
        calls: makes the environment's calls.
        env: the environment.
    """

    def __init__(
        self, cfg: DictConfig, calls: EnvironmentCalls, env: gymnasium.Env[Any, Any]
    ) -> None:
        self.cfg, self.calls, self.env, self.place = cfg, calls, env, calls.place
        self.manager = EnvironmentManager(
            **(
                manager_settings(cfg.env)
                | {"record_states": bool(OmegaConf.select(cfg, "validation.held_out"))}
            )
        )

    def run(self) -> None:
        """Play and compare.

        Raises:
            ConfigError: with the first thing that is wrong.
        """
        if not isinstance(self.env, gymnasium.Env):
            raise ConfigError(
                f"{self.place}: found a {type(self.env).__name__}, expected a gymnasium.Env; derive it from that"
            )
        self.calls.call("", lambda: _check_actions(self.env, place=self.place))
        first, second = self._reset(), self._reset()
        if not _same(first.observation, second.observation):
            raise ConfigError(
                f"{self.place}: two resets with seed {_SEED} began differently; draw from self.np_random only"
            )
        if first.observation is not None and first.observation.request is not None:
            return  # a program waits for its policy
        self._check_images(second)
        self._check_state_keys(first, second)
        for key, policy in _scripted_policies(self.cfg):
            self._check_scripted_policy(second, policy, key=key)
        named = second.action_names is not None
        self._step(second, 0 if named else self._drawn_action(np.random.default_rng(_SEED)))
        with only_new_garbage():
            self._check_episodes()
        self._check_stages()
        self._warn_of_garbage()

    def _reset(self, seed: int = _SEED) -> EnvironmentSlot:
        reset = partial(self.env.reset, seed=seed, options=None)
        answer = self.calls.call(f"reset(seed={seed}, options=None)", reset)
        slot = EnvironmentSlot(env=self.env, spec=EpisodeSpec(group=0, member=0, seed=seed))

        def read() -> None:
            raw = self.manager.answers.reset(answer)
            slot.reward_range = slot.members.reward_range
            slot.difficulty = slot.members.difficulty()
            self.manager.observe(slot, raw)

        self.calls.call("", read)
        return slot

    def _step(self, slot: EnvironmentSlot, action: int | str) -> tuple[float, bool]:
        """Take a step and return its reward and whether the episode has ended."""
        answer = self.calls.call(f"step({action!r})", partial(self.env.step, action))

        def read() -> tuple[float, bool]:
            step = self.manager.answers.step(answer, reward_range=slot.reward_range)
            self.manager.observe(slot, step.raw)
            return sum(step.reward_terms.values()), step.terminated or step.truncated

        return self.calls.call("", read)

    def _drawn_action(self, rng: np.random.Generator) -> int | str:
        """Return an action that the environment draws; of free texts any, where it draws none."""
        members = EnvironmentMembers(self.env)

        def draw() -> int | str:
            try:
                return members.random_action(rng)
            except TypeError:
                return _TEXT

        return self.calls.call("random_action(rng)", draw)

    def _check_images(self, slot: EnvironmentSlot) -> None:
        shows = bool(slot.observation and slot.observation.images)
        if shows != bool(self.cfg.env.get("visual", shows)):
            content, value = ("an image", "true") if shows else ("no image", "false")
            raise ConfigError(
                f"{self.place}: found {content} in its observation; set env.visual={value} "
                f"model={'small_vlm' if shows else 'small_lm'}"
            )

    def _check_state_keys(self, first: EnvironmentSlot, second: EnvironmentSlot) -> None:
        if not self.manager.record_states:
            return
        if first.state_key is None:
            raise ConfigError(
                f"{self.place}: has no state_key() that returns a str, which validation.held_out=true needs; "
                "write one, or set validation.held_out=false"
            )
        if first.state_key != second.state_key:
            raise ConfigError(
                f"{self.place}: state_key() differs after two resets with seed {_SEED}, so that "
                "validation.held_out=true would hold nothing out; build it from the state alone"
            )

    def _check_scripted_policy(
        self, slot: EnvironmentSlot, settings: DictConfig, *, key: str
    ) -> None:
        hint = f"give the environment what the policy needs, or choose another policy ({key}=…)"
        with config_errors(key, hint=hint):
            policy, rng = instantiate(settings), np.random.default_rng(_SEED)
            actions = self.calls.attempt(
                f"{type(policy).__name__}.act(env, rng)",
                lambda: [policy.act(slot.env, rng) for _ in range(_ACTIONS)],
                time_limit_factor=_ACTIONS,
            )
            if wrong := [action for action in actions if not _is_action(action, slot)]:
                raise ValueError(f"chose action {wrong[0]!r}, expected {_expected_action(slot)}")

    def _warn_of_garbage(self) -> None:
        """Warn where responses without a valid action earn more than random play."""
        honest = self._random_return()
        turns = 1 if self.manager.invalid_ends else self.manager.max_turns
        garbage = -self.manager.format_penalty * turns
        if honest is not None and garbage > honest:
            log.warning(
                "%s: responses without a valid action earn %.3g an episode, more than the %.3g of random play; an "
                "agent may learn to answer nothing; set env.format_penalty=%.2g",
                self.place,
                garbage,
                honest,
                1.1 * -honest / turns,
            )

    def _random_return(self) -> float | None:
        """Return the mean return of a few random episodes; None of an environment that draws no free texts."""
        rng, returns, steps = np.random.default_rng(_SEED), list[float](), 0
        for seed in range(_COMPARED):
            slot, over = self._reset(seed), False
            returns.append(0.0)
            for _ in range(self.manager.max_turns):
                try:
                    action = EnvironmentMembers(self.env).random_action(rng)
                except TypeError:
                    return None
                reward, over = self._step(slot, action)
                returns[-1] += reward
                steps += 1
                if over:
                    break
            if steps >= _COMPARED_STEPS:
                break
        return float(np.mean(returns))

    def _check_stages(self) -> None:
        """Check that the environment takes the reset options of each stage, and name one that is wrong by itself."""
        for node in ("curriculum", "warm_start"):
            stages = OmegaConf.select(self.cfg, f"{node}.stages")
            plain: Any = OmegaConf.to_container(stages, resolve=True) if stages else []
            for stage, options in enumerate(plain):
                self._check_stage(f"{node}.stages.{stage}", options)

    def _check_stage(self, key: str, options: dict[str, Any]) -> None:
        with config_errors(f"{key}={options}"):
            try:
                self._reset_with(options or None)
            except ConfigError:
                raise
            except Exception:
                for name, value in options.items():
                    with config_errors(f"{key}.{name}={value}"):
                        self._reset_with({name: value})
                raise

    def _reset_with(self, options: dict[str, Any] | None) -> None:
        reset = partial(self.env.reset, seed=_SEED, options=options)
        self.calls.attempt(f"reset(seed={_SEED}, options={options})", reset)

    def _check_episodes(self) -> None:
        """Play the beginnings of random episodes twice: the second time must be equal to the first."""
        images: list[np.ndarray] = []
        memory: list[int | None] = []
        for seed in range(_EPISODES):
            first, second = (self._played(seed, memory) for _ in range(2))
            for number, (moment, again) in enumerate(zip_longest(first, second)):
                if moment is None or again is None or not _equal(moment, again):
                    raise ConfigError(
                        f"{self.place}: two episodes with seed {seed} and equal actions differ after {number} steps; "
                        "draw from self.np_random only, and keep nothing from one episode to the next"
                    )
            images += [image for moment in first for image in moment.observation.images]
            texts = [moment.observation.text for moment in first]
            window = OmegaConf.select(self.cfg, "context.window")
            if self.manager.max_turns > _GROWS and window == "all":
                _check_growth(texts, place=self.place)
        _check_variety(images, place=self.place)
        if not self.cfg.env.get("process"):
            _warn_of_memory(memory, place=self.place)

    def _played(self, seed: int, memory: list[int | None]) -> list[_Moment]:
        """Return the first moments of a random episode, and append the memory in use before it."""
        memory.append(used_memory())
        slot, rng = self._reset(seed), np.random.default_rng(seed)
        assert slot.observation is not None
        moments = [_Moment(slot.observation, 0.0, slot.state_key)]
        for _ in range(min(_STEPS, self.manager.max_turns)):
            reward, ended = self._step(slot, self._drawn_action(rng))
            moments.append(_Moment(slot.observation, reward, slot.state_key))
            if ended:
                break
        return moments


def _check_actions(env: gymnasium.Env[Any, Any], *, place: str) -> None:
    environment: Any = env.unwrapped
    space = getattr(environment, "action_space", None)
    if isinstance(space, spaces.Text):
        return
    if not isinstance(space, spaces.Discrete):
        raise ConfigError(
            f"{place}: found action_space={space}, expected Discrete(n) for named actions or Text(max_length) for "
            "free text; set it"
        )
    if space.start != 0:
        raise ConfigError(
            f"{place}: found action_space={space}, expected one that starts at 0, since step gets the index of a "
            f"name; set Discrete({space.n})"
        )
    names = getattr(environment, "action_names", None)
    if not isinstance(names, Sequence) or isinstance(names, str) or len(names) != space.n:
        raise ConfigError(
            f"{place}: found action_names={names!r}, expected a name for each of {space.n} actions; "
            'set action_names = ("Up", …)'
        )
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{place}: found action_names={tuple(names)!r}, expected texts; quote each name"
        )
    plain = [name.strip().casefold() for name in names]
    if len(set(plain)) < len(plain) or not all(plain):
        raise ConfigError(
            f"{place}: found action_names={tuple(names)!r}, expected names that differ; case does not count"
        )
    if any(mark in name for name in plain for mark in _RESERVED):
        raise ConfigError(
            f"{place}: found action_names={tuple(names)!r}, expected none of {', '.join(_RESERVED)} in them"
        )


def _scripted_policies(cfg: DictConfig) -> list[tuple[str, DictConfig]]:
    baselines = OmegaConf.select(cfg, "validation.baselines") or {}
    policies = [
        (f"validation.baselines.{name}", policy) for name, policy in baselines.items() if policy
    ]
    if OmegaConf.select(cfg, "warm_start.enabled"):
        policies.append(("warm_start.demonstrator", cfg.warm_start.demonstrator))
    return policies


def _is_action(action: int | str, slot: EnvironmentSlot) -> bool:
    # that of a policy whose responses are invalid
    if action == "":
        return True
    if slot.action_names is None:
        return isinstance(action, str)
    return not isinstance(action, str) and 0 <= action < len(slot.action_names)


def _expected_action(slot: EnvironmentSlot) -> str:
    return "a text" if slot.action_names is None else f"0 to {len(slot.action_names) - 1}"


def _check_variety(images: Sequence[np.ndarray], *, place: str) -> None:
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


def _warn_of_memory(memory: Sequence[int | None], *, place: str) -> None:
    """Warn of an environment that keeps memory of each episode.

    Args:
        memory: bytes in use before each episode.
        place: key and value of the environment.
    """
    known = [number for number in memory if number is not None]
    kept = [after - before for before, after in pairwise(known)][_FIRST_EPISODES:]
    if kept and min(kept) >= _KEPT:
        log.warning(
            "%s: each episode keeps about %d MiB of memory; free it in reset, or set env.process=true env.memory_mb=…",
            place,
            sorted(kept)[len(kept) // 2] >> 20,
        )


def _same(first: Observation | None, second: Observation | None) -> bool:
    if first is None or second is None or len(first.images) != len(second.images):
        return first is second
    images = zip(first.images, second.images, strict=True)
    return first.text == second.text and all(np.array_equal(*pair) for pair in images)


def _equal(first: _Moment, second: _Moment) -> bool:
    same = _same(first.observation, second.observation)
    return same and (first.reward, first.state_key) == (second.reward, second.state_key)
