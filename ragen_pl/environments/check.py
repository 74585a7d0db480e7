"""Checks of an environment before a model is built: it is made, and its first turns are played."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ragen_pl.base.machine import only_new_garbage, used_memory
from ragen_pl.config.environments import environment_configs, environment_nodes, is_mixture
from ragen_pl.config.errors import ConfigError, config_errors
from ragen_pl.environments.calls import EnvironmentCalls, manager_settings
from ragen_pl.environments.manager import EnvironmentManager, EnvironmentSlot, EpisodeSpec
from ragen_pl.environments.members import EnvironmentMembers
from ragen_pl.prompts.hint import HINTED_REQUEST, UNHINTED, Hint
from ragen_pl.prompts.parsing import named_actions
from ragen_pl.trajectory import Observation

log = logging.getLogger(__name__)

_SEED = 0
# of each scripted policy: it may choose by chance
_ACTIONS = 32
# random episodes, each played twice, and their steps
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


def check_environments(cfg: DictConfig) -> dict[str, gymnasium.Env[Any, Any]]:
    """Check each environment of a run with its own settings, and return them closed and unwrapped, by name.

    Raises:
        ConfigError: One breaks the protocol, or in a mixture does not say whether its task is solved, or has other
            seats than the rest.
    """
    compared = is_mixture(cfg.env)
    environments = {
        name: check_environment(alone, says_success=compared)
        for name, alone in environment_configs(cfg).items()
    }
    trained = (name for name, env in environment_nodes(cfg.env).items() if env.get("share", 1) > 0)
    seats = {name: EnvironmentMembers(environments[name]).seats for name in trained}
    if len({*seats.values()}) > 1:
        found = ", ".join(f"{name} has seats={number}" for name, number in seats.items())
        raise ConfigError(
            f"env.environments: {found}; give all as many, as by an opponent in the game"
        )
    return environments


def check_environment(cfg: DictConfig, *, says_success: bool = False) -> gymnasium.Env[Any, Any]:
    """Make the config's environment, play its first turns and return it closed and unwrapped.

    Scripted policies choose actions in it, and the stages of the curriculum and of the warm start are tried.

    Args:
        cfg: Config of a run with one environment.
        says_success: Whether it has to say whether its task is solved.

    Raises:
        ConfigError: It breaks the protocol; with what was found, what was expected and the remedy.
    """
    calls = EnvironmentCalls(cfg.env)
    try:
        env = calls.make()
        check = _Check(cfg, calls, env, says_success=says_success)
        check.run()
        calls.close()
        check.check_another()
    finally:
        calls.close()
    return env.unwrapped


@dataclass(frozen=True, slots=True)
class _Moment:
    """The outcome of a reset or a step: observation, reward and state key."""

    observation: Observation
    reward: float
    state_key: str | None

    def difference(self, other: _Moment) -> str | None:
        """Return the name of the first part that differs; None if all are equal."""
        mine, its = self.observation, other.observation
        images = len(mine.images) == len(its.images)
        same = {
            "text": mine.text == its.text,
            "images": images and all(map(np.array_equal, mine.images, its.images)),
            "reward": self.reward == other.reward,
            "state_key()": self.state_key == other.state_key,
        }
        return next((part for part, equal in same.items() if not equal), None)


class _Check:
    """The checks of one environment.

    Args:
        cfg: Config of a run.
        calls: Makes the environment's calls.
        env: The environment.
        says_success: Whether it has to say whether its task is solved.
    """

    def __init__(
        self,
        cfg: DictConfig,
        calls: EnvironmentCalls,
        env: gymnasium.Env[Any, Any],
        *,
        says_success: bool,
    ) -> None:
        self.cfg, self.calls, self.env = cfg, calls, env
        self._needs_success = says_success
        record_states = bool(OmegaConf.select(cfg, "validation.held_out"))
        settings = manager_settings(cfg.env) | {"record_states": record_states}
        self.manager = EnvironmentManager(**settings)
        self._says_success = False
        self._first: list[_Moment] = []
        # in a mixture another environment may have hints
        hint = None if says_success else OmegaConf.select(cfg, "algorithm.loss.kl.hint")
        with config_errors("algorithm.loss.kl.hint"):
            self._hint: Hint | None = instantiate(hint)
        self._has_hint = False

    def run(self) -> None:
        """Play and compare.

        Raises:
            ConfigError: With the first thing that is wrong.
        """
        self._require(
            isinstance(self.env, gymnasium.Env),
            f"found a {type(self.env).__name__}, expected a gymnasium.Env; derive it from that",
        )
        self.calls.call("", self._check_actions)
        slot = self._reset()
        if slot.observation is None or slot.awaits_answer:
            self._require(
                OmegaConf.select(self.cfg, "algorithm.loss.kl.hint") is None, HINTED_REQUEST
            )
            self._warn_of_training_tasks()
            return  # a program waits for its policy
        shows = bool(slot.observation.images)
        content, model = ("an image", "small_vlm") if shows else ("no image", "small_lm")
        show = "" if shows else "show one after reset, or "
        self._require(
            shows == bool(self.cfg.env.get("visual", shows)),
            f"found {content} in its observation; {show}set env.visual={str(shows).lower()} model={model}",
        )
        self._require(
            slot.state_key is not None or not self.manager.reader.states,
            "has no state_key() that returns a str, which validation.held_out=true needs; write one, or set "
            "validation.held_out=false",
        )
        for key, policy in _scripted_policies(self.cfg):
            self._check_scripted_policy(slot, policy, key=key)
        with only_new_garbage():
            self._check_episodes()
        self._require(
            self._hint is None or self._has_hint,
            f"no state of its random episodes has a hint, {UNHINTED}",
        )
        self._check_stages()
        self._warn_of_garbage()
        self._require(
            self._says_success or not self._needs_success,
            "no step of its random episodes sets info['success'], by which the environments of a mixture are compared; "
            "set it to true or false in each step",
        )
        if not self._says_success:
            log.warning(
                "%s: no step of its random episodes sets info['success'], so success is 0 everywhere; best.ckpt, the "
                "curriculum and sweeps go by the return; set it to true or false in each step",
                self.calls.place,
            )

    def _warn_of_training_tasks(self) -> None:
        env = self.cfg.env
        held_out = (env.get("validation_tasks"), env.get("held_out_fraction"))
        if env.get("tasks") and held_out == (None, None):
            log.warning(
                "env.validation_tasks=null: validation plays the tasks of training; set a fraction of them that "
                "training leaves out, such as 0.2, or the file of other tasks"
            )

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise ConfigError(f"{self.calls.place}: {otherwise}")

    def _check_actions(self) -> None:
        environment: Any = self.env.unwrapped
        space: Any = getattr(environment, "action_space", None)
        if isinstance(space, spaces.Text):
            return
        found = f"found action_space={space}, expected"
        self._require(
            isinstance(space, spaces.Discrete),
            f"{found} Discrete(n) for named actions or Text(max_length) for free text; set it",
        )
        self._require(
            space.start == 0,
            f"{found} one that starts at 0, since step gets the index of a name; set Discrete({space.n})",
        )
        names: Any = getattr(environment, "action_names", None)
        found = f"found action_names={names!r}, expected"
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        self._require(
            is_list and len(names) == space.n,
            f'{found} a name for each of {space.n} actions; set action_names = ("Up", …)',
        )
        self._require(
            all(isinstance(name, str) for name in names), f"{found} texts; quote each name"
        )
        plain = [name.strip().casefold() for name in names]
        self._require(
            len(set(plain)) == len(plain) and all(plain),
            f"{found} names that differ; case does not count",
        )
        self._require(
            not any(mark in name for name in plain for mark in _RESERVED),
            f"{found} none of {', '.join(_RESERVED)} in them",
        )

    def _reset(self, seed: int = _SEED) -> EnvironmentSlot:
        reset = partial(self.env.reset, seed=seed, options=None)
        answer = self.calls.call(f"reset(seed={seed}, options=None)", reset)
        slot = EnvironmentSlot(env=self.env, spec=EpisodeSpec(group=0, member=0, seed=seed))
        self.calls.call("", partial(self.manager.reader.begin, slot, answer))
        return slot

    def _step(self, slot: EnvironmentSlot, action: int | str) -> tuple[float, bool]:
        """Take a step and return its reward and whether the episode has ended."""
        take = partial(self.manager.reader.take, slot, mover=slot.seat)
        answer = self.calls.call(f"step({action!r})", partial(self.env.step, action))
        step = self.calls.call("", partial(take, answer))
        self._says_success |= step.success is not None
        return sum(step.reward_terms.values()), step.terminated or step.truncated

    def _played(self, seed: int, *, steps: int) -> list[_Moment]:
        """Return the first moments of a random episode."""
        slot, rng = self._reset(seed), np.random.default_rng(seed)
        assert slot.observation is not None
        moments = [_Moment(slot.observation, 0.0, slot.state_key)]
        for _ in range(min(steps, self.manager.max_turns)):
            self._look_for_hint(slot)
            action = self.calls.call("random_action(rng)", partial(self._random_action, rng))
            reward, ended = self._step(slot, _TEXT if action is None else action)
            moments.append(_Moment(slot.observation, reward, slot.state_key))
            if ended:
                break
        return moments

    def _look_for_hint(self, slot: EnvironmentSlot) -> None:
        """Note whether a teacher reads more of a state than the policy."""
        if self._hint is None or self._has_hint:
            return
        shown, members = slot.observation, slot.members
        assert shown is not None
        state = self.calls.call("describe()", members.describe)
        plan = self.calls.call("plan()", members.plan)
        self._has_hint = self._hint.observation(shown, state=state, plan=plan) is not shown

    def _random_action(self, rng: np.random.Generator) -> int | str | None:
        """Return an action that the environment draws; None of free texts where it draws none."""
        try:
            return EnvironmentMembers(self.env).random_action(rng)
        except TypeError:
            return None

    def _check_scripted_policy(
        self, slot: EnvironmentSlot, settings: DictConfig, *, key: str
    ) -> None:
        hint = "give the environment what the policy needs, or "
        if "base" in settings:
            hint += f"play at random: {key}.base=blind {key}.noise=1.0"
        elif key.startswith("validation.baselines."):
            hint += f"leave the policy out: {key}=null"
        else:
            hint += f"choose another policy ({key}=…)"
        with config_errors(key, hint=hint):
            policy, rng = instantiate(settings), np.random.default_rng(_SEED)
            actions = self.calls.attempt(
                f"{type(policy).__name__}.act(env, rng)",
                lambda: [policy.act(slot.env, rng) for _ in range(_ACTIONS)],
                time_limit_factor=_ACTIONS,
            )
            names, most = slot.action_names, self.cfg.env.max_actions_per_turn
            numbers = range(len(names or ()))
            for action in actions:
                several = isinstance(action, str) and names is not None
                chosen = named_actions(action, names, max_actions=len(action)) if several else []
                if len(chosen) > most:
                    raise ValueError(
                        f"chose {len(chosen)} actions, {action!r}, expected at most env.max_actions_per_turn={most}"
                    )
                is_valid = isinstance(action, str) if names is None else action in numbers or chosen
                # an empty text is the action of a policy whose responses are invalid
                if action != "" and not is_valid:
                    expected = "a text" if names is None else f"0 to {len(names) - 1}"
                    raise ValueError(f"chose action {action!r}, expected {expected}")

    def _check_stages(self) -> None:
        """Check that the environment takes the reset options of each stage, and name one that is wrong by itself."""
        for node in ("curriculum", "warm_start"):
            stages = OmegaConf.select(self.cfg, f"{node}.stages")
            plain: Any = OmegaConf.to_container(stages, resolve=True) if stages else []
            for stage, options in enumerate(plain):
                key = f"{node}.stages.{stage}"
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
            plays = []
            for _ in range(2):
                memory.append(used_memory())
                plays.append(self._played(seed, steps=_STEPS))
            self._require_equal(
                plays,
                f"two episodes with seed {seed}",
                "draw from self.np_random only, keep nothing from one episode to the next, and build state_key() from "
                "the state alone",
            )
            self._first = self._first or plays[0]
            images += [image for moment in plays[0] for image in moment.observation.images]
            self._check_growth([moment.observation.text for moment in plays[0]])
        self._require(
            not images or any(image.min() != image.max() for image in images),
            f"each of its {len(images)} images has one colour only; check its renderer (a second OpenGL context may "
            "draw nothing)",
        )
        self._require(
            len(images) <= _EPISODES
            or not all(np.array_equal(images[0], image) for image in images),
            f"all of its {len(images)} images are equal; check its renderer",
        )
        if not self.cfg.env.get("process"):
            self._warn_of_memory([number for number in memory if number is not None])

    def check_another(self) -> None:
        """Play the first episode in another instance, as the members of a group do."""
        if not self._first:
            return
        self.env = self.calls.make()
        self._require_equal(
            [self._first, self._played(_SEED, steps=_STEPS)],
            f"two instances with seed {_SEED}",
            "draw nothing in the constructor, such as a map or an order of tasks: the members of a group play in "
            "different instances",
        )

    def _require_equal(self, plays: Sequence[list[_Moment]], both: str, remedy: str) -> None:
        for step, (moment, again) in enumerate(zip_longest(*plays)):
            part = moment.difference(again) if moment and again else "length"
            self._require(
                part is None,
                f"{both} and equal actions differ in {part} after {step} steps; {remedy}",
            )

    def _check_growth(self, texts: Sequence[str]) -> None:
        if (
            OmegaConf.select(self.cfg, "context.window") != "all"
            or self.manager.max_turns <= _GROWS
        ):
            return
        grows = [bool(text) and text in later and later != text for text, later in pairwise(texts)]
        self._require(
            len(grows) < _GROWS or not all(grows),
            f"each observation contains the one before it ({len(texts[0])} to {len(texts[-1])} characters in "
            f"{len(grows)} steps), and context.window=all repeats them all; return what is new, or set "
            "context.window=1",
        )

    def _warn_of_memory(self, memory: Sequence[int]) -> None:
        """Warn of an environment that keeps memory of each episode, from the bytes in use before each."""
        kept = [after - before for before, after in pairwise(memory)][_FIRST_EPISODES:]
        if kept and min(kept) >= _KEPT:
            log.warning(
                "%s: each episode keeps about %d MiB of memory; free it in reset, or set env.process=true "
                "env.memory_mb=…",
                self.calls.place,
                sorted(kept)[len(kept) // 2] >> 20,
            )

    def _warn_of_garbage(self) -> None:
        """Warn where responses without a valid action earn more than random play."""
        # an action is drawn in a state that has one, not at the end of an episode
        self._reset()
        if self._random_action(np.random.default_rng(_SEED)) is None:
            return
        returns, steps = list[float](), 0
        for seed in range(_COMPARED):
            moments = self._played(seed, steps=self.manager.max_turns)
            returns.append(sum(moment.reward for moment in moments))
            steps += len(moments) - 1
            if steps >= _COMPARED_STEPS:
                break
        honest, turns = float(np.mean(returns)), self.manager.max_turns
        turns = 1 if self.manager.invalid_ends else turns
        garbage = self._forfeited() - self.manager.penalty(EnvironmentMembers(self.env)) * turns
        if garbage > honest:
            log.warning(
                "%s: responses without a valid action earn %.3g an episode, more than the %.3g of random play; an "
                "agent may learn to answer nothing; set env.format_penalty=%.2g",
                self.calls.place,
                garbage,
                honest,
                1.1 * -honest / turns,
            )

    def _forfeited(self) -> float:
        """Return the environment's reward of an episode that a first response without a valid action ends."""
        slot = self._reset()
        if not self.manager.invalid_ends or not slot.members.forfeits:
            return 0.0
        take = partial(self.manager.reader.take, slot, mover=slot.seat)
        forfeit = partial(slot.members.forfeit, slot.seat)
        answer = self.calls.call(f"forfeit({slot.seat})", forfeit)
        step = self.calls.call("", partial(take, answer))
        return sum(step.reward_terms.values())


def _scripted_policies(cfg: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    """Yield the policies that play in a run, each with its key."""
    for name, policy in (OmegaConf.select(cfg, "validation.baselines") or {}).items():
        if policy:
            yield f"validation.baselines.{name}", policy
    if OmegaConf.select(cfg, "warm_start.enabled") and not cfg.warm_start.get("records"):
        yield "warm_start.demonstrator", cfg.warm_start.demonstrator
