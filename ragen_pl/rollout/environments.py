"""EnvironmentManager: owns environments, their seeds and the reward terms of a turn.

Environments are given by class path or gymnasium id, never imported. The manager carries out several
actions a turn, penalizes invalid responses and limits turns. Rules belong to the environment itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from ragen_pl.constraints import Count, NonNegative, Positive, checked
from ragen_pl.rollout.formats import BLOCKS, PromptFormat, format_instructions
from ragen_pl.rollout.parsing import ParsedResponse
from ragen_pl.rollout.spatial_relations import f1_score, read_claims, true_claims
from ragen_pl.rollout.workers import EnvironmentWorkers, Outcome
from ragen_pl.seeding import derive_seed
from ragen_pl.trajectory import EpisodeStatus, Observation, Relation, Statement

_MAX_REDRAWS = 200
# a larger reward is infinite once returns are summed in float32
_MAX_REWARD = 1e30
_GRAY = 128


@dataclass(kw_only=True, slots=True)
class EpisodeSpec:
    """Episode to play. Members of a group share a seed and so an initial state.

    Attributes:
        group: index of the group.
        member: index in the group.
        seed: seed of the environment's reset.
        options: options of the reset.
    """

    group: int
    member: int
    seed: int
    options: Mapping[str, object] | None = None


class EnvironmentMembers:
    """Members of an environment beyond gymnasium's interface; all but `action_names` are optional.

    A missing method reads as one that returns None.

    Args:
        env: the environment, with any wrappers.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._environment: Any = env.unwrapped

    @property
    def action_names(self) -> Sequence[str]:
        """Name of each action, by index."""
        names: Sequence[str] = self._environment.action_names
        return names

    @property
    def instructions(self) -> str:
        """Rules in full sentences; empty without any."""
        return str(getattr(self._environment, "instructions", ""))

    @property
    def relation_names(self) -> tuple[str, ...]:
        """All things that `relations` may name; empty where the environment does not list them."""
        return tuple(getattr(self._environment, "relation_names", ()))

    def state_key(self) -> str | None:
        """Return text that two states share exactly when they are equal."""
        return self._call("state_key")

    def describe(self) -> str | None:
        """Return a true description of the present state."""
        return self._call("describe")

    def difficulty(self) -> int | None:
        """Return how hard the present state is."""
        return self._call("difficulty")

    def relations(self) -> list[Relation] | None:
        """Return the positions of things relative to the player."""
        return self._call("relations")

    def _call(self, name: str) -> Any:
        method = getattr(self._environment, name, None)
        return None if method is None else method()


@dataclass(kw_only=True, slots=True)
class TurnResult:
    """Outcome of a turn's actions.

    Attributes:
        observation: what the environment shows next.
        reward_terms: terms `environment` and `format`.
        statements: statements of the response, with the true relations.
        status: how the episode ended; None while it runs.
        success: whether the task is solved.
        effective: whether an action changed the environment.
        actions: names of the actions carried out.
        info: what the last step returned in addition to the observation.
        error: the environment's error.
    """

    observation: Observation | None = None
    reward_terms: dict[str, float] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    status: EpisodeStatus | None = None
    success: bool = False
    effective: bool = False
    actions: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(kw_only=True, slots=True)
class EnvironmentSlot:
    """One running environment with the present state of its episode.

    Attributes:
        env: the environment.
        worker: number of its thread.
        spec: the episode.
        observation: the latest observation.
        action_names: name of each action, by index.
        state_key: key of the present state, where it is recorded.
        state_description: the environment's description of the present state.
        relations: positions of things, in formats that ask for statements.
        difficulty: difficulty of the initial state.
        turn: number of turns played.
        error: the environment's error; a slot with an error is not used again.
    """

    env: gymnasium.Env[Any, Any]
    spec: EpisodeSpec
    worker: int = 0
    observation: Observation | None = None
    action_names: Sequence[str] = ()
    state_key: str | None = None
    state_description: str | None = None
    relations: list[Relation] | None = None
    difficulty: int | None = None
    turn: int = 0
    error: str | None = None

    @property
    def members(self) -> EnvironmentMembers:
        """Members of the environment beyond gymnasium's interface."""
        return EnvironmentMembers(self.env)


class EnvironmentManager:
    """Create, reset and step environments, many in one call.

    Args:
        target: gymnasium id (`ragen/FrozenLake-v0`) or class path (`my_package.my_module.MyEnv`).
        kwargs: arguments of the environment.
        max_turns: turns of an episode; the limit belongs to the task (`EpisodeStatus.TURN_LIMIT`).
        max_actions_per_turn: number of actions carried out of one response.
        format_penalty: amount taken from a turn whose response has no valid action.
        invalid_ends: whether such a response ends the episode; otherwise the state stays as it is.
        turn_limit_bootstraps: whether the turn limit truncates an episode (`EpisodeStatus.TRUNCATED`).
        prompt_format: required form of responses.
        timeout_s: longest time of one reset or one turn in seconds; None for no limit.
        workers: number of threads in which environments step; an environment stays in one of them. Several are faster
            for environments that wait for other programs or compute outside Python.
        held_out: keys of initial states that a reset must not draw.
        record_states: whether turns record the `state_key()` they begin in.
        blank_images: whether images are replaced by gray ones, to measure what an agent does without them.
    """

    @checked
    def __init__(
        self,
        *,
        target: str,
        kwargs: Mapping[str, object] | None = None,
        max_turns: Count = 10,
        max_actions_per_turn: Count = 1,
        format_penalty: NonNegative = 0.05,
        invalid_ends: bool = True,
        turn_limit_bootstraps: bool = False,
        prompt_format: PromptFormat = PromptFormat.FREE_THINK,
        timeout_s: Positive | None = 60.0,
        workers: Count = 1,
        held_out: Collection[str] = frozenset(),
        record_states: bool = False,
        blank_images: bool = False,
    ) -> None:
        self.target = target
        self.kwargs = dict(kwargs or {})
        self.max_turns = max_turns
        self.max_actions_per_turn = max_actions_per_turn
        self.format_penalty = format_penalty
        self.invalid_ends = invalid_ends
        self.turn_limit_bootstraps = turn_limit_bootstraps
        self.prompt_format = PromptFormat(prompt_format)
        self.timeout_s = timeout_s
        self.held_out = held_out
        self.record_states = record_states
        self.blank_images = blank_images
        self._make = environment_maker(target)
        self._workers: EnvironmentWorkers[Any] = EnvironmentWorkers(workers, timeout_s=timeout_s)
        # sound environments that nobody plays, with their threads
        self._idle: list[tuple[gymnasium.Env[Any, Any], int]] = []
        self._made = 0
        # turns under way
        self._stepping: set[int] = set()

    def make(self) -> gymnasium.Env[Any, Any]:
        """Create an environment."""
        return self._make(**self.kwargs)

    def open(self, specs: Sequence[EpisodeSpec]) -> list[EnvironmentSlot]:
        """Return a slot at its first observation for each episode; a failed reset leaves its error there."""
        self._stepping.clear()
        slots = [
            EnvironmentSlot(env=env, worker=worker, spec=spec)
            for spec, (env, worker) in zip(specs, self._take(len(specs)), strict=True)
        ]
        outcomes = self._workers.run([(slot.worker, partial(self._reset, slot)) for slot in slots])
        for slot, outcome in zip(slots, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                slot.error = _error_text(outcome)
        return slots

    def _take(self, count: int) -> list[tuple[gymnasium.Env[Any, Any], int]]:
        """Return idle or new environments with their threads."""
        taken = [self._idle.pop() for _ in range(min(count, len(self._idle)))]
        workers = [self._made + number for number in range(count - len(taken))]
        self._made += len(workers)
        made = self._workers.run([(worker, self.make) for worker in workers])
        for worker, outcome in zip(workers, made, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            taken.append((outcome, worker))
        return taken

    def step(
        self, slots: Sequence[EnvironmentSlot], responses: Sequence[ParsedResponse]
    ) -> list[TurnResult]:
        """Carry out one response in each environment and wait for all."""
        numbers = self.start(slots, responses)
        results: dict[int, TurnResult] = {}
        while len(results) < len(numbers):
            results.update(self.finished())
        return [results[number] for number in numbers]

    def start(
        self, slots: Sequence[EnvironmentSlot], responses: Sequence[ParsedResponse]
    ) -> list[int]:
        """Start to carry out one response in each environment; return the numbers of these turns."""
        pairs = zip(slots, responses, strict=True)
        numbers = self._workers.submit(
            [(slot.worker, partial(self._turn, slot, response)) for slot, response in pairs]
        )
        self._stepping.update(numbers)
        return numbers

    def finished(self, *, wait_s: float | None = None) -> list[tuple[int, TurnResult]]:
        """Return the turns that have ended since the last call, each with its number.

        Args:
            wait_s: Longest time to wait for the first one in seconds; None waits until there is one.
        """
        # those of a rollout that was interrupted are dropped
        ended = [
            (number, _turn_result(outcome))
            for number, outcome in self._workers.collect(wait_s=wait_s)
            if number in self._stepping
        ]
        self._stepping.difference_update(number for number, _ in ended)
        return ended

    def close(self, slots: Sequence[EnvironmentSlot]) -> None:
        """Take sound environments back for later episodes."""
        self._idle.extend((slot.env, slot.worker) for slot in slots if slot.error is None)

    def instructions(self, slot: EnvironmentSlot) -> str:
        """Return the rules of a slot's environment and those of the response's form."""
        form = format_instructions(self.prompt_format, max_actions=self.max_actions_per_turn)
        return f"{slot.members.instructions} {form}".strip()

    def observe(self, slot: EnvironmentSlot, raw: object) -> None:
        """Update a slot with an observation of its environment.

        Raises:
            TypeError: the observation is neither text nor text with an image.
        """
        members = slot.members
        slot.observation = self._observation(raw)
        slot.action_names = members.action_names
        slot.state_description = members.describe()
        if self.record_states:
            slot.state_key = members.state_key()
        if self.prompt_format.statements:
            slot.relations = members.relations()

    def _reset(self, slot: EnvironmentSlot) -> None:
        spec, members = slot.spec, slot.members
        options = dict(spec.options) if spec.options else None
        raw, _ = slot.env.reset(seed=spec.seed, options=options)
        draw = 0
        while self.held_out and members.state_key() in self.held_out:
            draw += 1
            if draw > _MAX_REDRAWS:
                raise RuntimeError(
                    f"{_MAX_REDRAWS} initial states in a row are held out; the environment is too small "
                    "for its validation set"
                )
            raw, _ = slot.env.reset(seed=derive_seed(spec.seed, "redraw", draw), options=options)
        slot.difficulty = members.difficulty()
        self.observe(slot, raw)

    def _observation(self, raw: object) -> Observation:
        if isinstance(raw, str):
            return Observation(text=_encodable(raw))
        if isinstance(raw, Mapping) and isinstance(raw.get("text"), str) and "image" in raw:
            return Observation(text=_encodable(raw["text"]), images=[self._image(raw["image"])])
        raise TypeError(
            f"{self.target} returned an observation of type {type(raw).__name__}; "
            "expected a str, or a dict with 'text' (str) and 'image' (uint8 [height, width, 3])"
        )

    def _image(self, raw: object) -> np.ndarray:
        image = np.asarray(raw)
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
            raise TypeError(
                f"{self.target} returned an image of shape {image.shape} and type {image.dtype}; "
                "expected uint8 [height, width, 3]"
            )
        # an environment may draw its next image into the same array
        return np.full_like(image, _GRAY) if self.blank_images else image.copy()

    def _turn(self, slot: EnvironmentSlot, response: ParsedResponse) -> TurnResult:
        slot.turn += 1
        result, relations = TurnResult(), slot.relations
        if not response.valid:
            result.reward_terms["format"] = -self.format_penalty
            result.status = EpisodeStatus.TERMINATED if self.invalid_ends else None
            result.observation = slot.observation
        for action in response.actions:
            self._act(slot, action, result)
            if result.status is not None:
                break
        if response.valid and relations is not None:
            result.statements = _statements(slot, response, before=relations)
        if result.status is None and slot.turn >= self.max_turns:
            result.status = (
                EpisodeStatus.TRUNCATED if self.turn_limit_bootstraps else EpisodeStatus.TURN_LIMIT
            )
        return result

    def _act(self, slot: EnvironmentSlot, action: int, result: TurnResult) -> None:
        """Carry out one action and add its outcome to the turn's result."""
        raw, reward, terminated, truncated, info = slot.env.step(action)
        if not abs(float(reward)) < _MAX_REWARD:
            raise ValueError(f"{self.target} returned reward {reward}; expected a finite number")
        terms = result.reward_terms
        terms["environment"] = terms.get("environment", 0.0) + float(reward)
        result.actions.append(slot.action_names[action])
        result.effective |= bool(info.get("action_is_effective", True))
        result.success, result.info = bool(info.get("success", False)), dict(info)
        self.observe(slot, raw)
        result.observation = slot.observation
        if terminated or truncated:
            result.status = EpisodeStatus.TERMINATED if terminated else EpisodeStatus.TRUNCATED


def _statements(
    slot: EnvironmentSlot, response: ParsedResponse, *, before: list[Relation]
) -> list[Statement]:
    """Return the statements of a response with the relations before or after its actions."""
    relations = {"before": before, "after": slot.relations or []}
    names = slot.members.relation_names or tuple(dict.fromkeys(name for name, *_ in before))
    statements = []
    for block, text in response.statements.items():
        true = relations[BLOCKS[block].state or "before"]
        agreement = f1_score(read_claims(text, names), true_claims(true))
        statements.append(
            Statement(block=block, text=text, true_relations=true, names=names, agreement=agreement)
        )
    return statements


def environment_maker(target: str) -> Callable[..., gymnasium.Env[Any, Any]]:
    """Return the constructor of an environment.

    Args:
        target: gymnasium id or class path.

    Raises:
        ValueError: there is no such environment.
    """
    if "/" in target or target in gymnasium.registry:
        return lambda **kwargs: gymnasium.make(target, disable_env_checker=True, **kwargs)
    from hydra.utils import get_class

    try:
        return get_class(target)
    except Exception as error:
        raise ValueError(
            f"env.target={target}: names no environment ({error}); give a gymnasium id or a class path such as "
            "'envs.frozen_lake.FrozenLake'"
        ) from error


def _encodable(text: str) -> str:
    """Return the text, or raise UnicodeEncodeError for half a surrogate pair, which no tokenizer can read."""
    text.encode()
    return text


def _turn_result(outcome: Outcome[TurnResult]) -> TurnResult:
    if isinstance(outcome, BaseException):
        return TurnResult(status=EpisodeStatus.FAILED, error=_error_text(outcome))
    return outcome


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
