"""EnvironmentManager: owns environments, their seeds and what a turn is worth.

Environments are joined by class path or gymnasium id, never imported. Parsing, several actions a turn,
the format penalty and the turn limit belong here; the environment's own rules belong to the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

from ragen_pl.constraints import Count, NonNegative, Positive, checked
from ragen_pl.rollout.formats import PREDICTION, PromptFormat
from ragen_pl.rollout.parsing import ParsedResponse
from ragen_pl.rollout.relations import f1, read
from ragen_pl.rollout.relations import truth as claims_of
from ragen_pl.rollout.timeouts import run_guarded
from ragen_pl.seeding import derive_seed
from ragen_pl.trajectory import EpisodeStatus, Observation, Relation, Statement

_DRAWS = 200  # tries to draw a start that is not held out


@dataclass(kw_only=True, slots=True)
class EpisodeSpec:
    """Which episode an environment plays. Members of a group have the same seed, thus the same start."""

    group: int
    member: int
    seed: int
    options: Mapping[str, object] | None = None


@dataclass(kw_only=True, slots=True)
class TurnResult:
    """What came of a turn's actions."""

    observation: Observation | None = None
    reward_terms: dict[str, float] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    status: EpisodeStatus | None = None  # None: the episode goes on
    success: bool = False
    effective: bool = False
    carried_out: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def reward(self) -> float:
        """The sum of the parts."""
        return float(sum(self.reward_terms.values()))


@dataclass(kw_only=True, slots=True)
class EnvironmentSlot:
    """One environment and where its episode stands."""

    env: gymnasium.Env[Any, Any]
    start: EpisodeSpec
    observation: Observation | None = None
    action_names: Sequence[str] = ()
    state: str | None = None  # the present state's key, where it is recorded
    truth: str | None = None  # the environment's own true description of the present state
    relations: list[Relation] | None = None  # where things are, in formats that ask for it
    difficulty: int | None = None
    turn: int = 0
    error: str | None = None


_MOST = 1e30  # a reward beyond it is infinite once returns are summed in float32


class EnvironmentManager:
    """Create, reset and step environments; one call serves many environments.

    A turn's reward has parts by name: `environment`, the environment's own, and `format`, the penalty.

    Args:
        target: gymnasium id (`ragen/FrozenLake-v0`) or class path (`my_package.my_module.MyEnv`).
        kwargs: the environment's arguments.
        max_turns: turns of an episode; the limit belongs to the task and ends it (`Ending.TURN_LIMIT`).
        max_actions_per_turn: actions carried out of one response.
        format_penalty: taken from the reward of a turn whose response has no valid action.
        invalid_ends: whether such a response ends the episode (else the environment stays as it is).
        turn_limit_bootstraps: treat the turn limit as a cut from outside (`Ending.TRUNCATED`).
        prompt_format: the form that a response must have, see `PromptFormat`.
        timeout_s: longest time of one reset or one turn of an environment, None for no limit.
        held_out: start states (`state_key()`) that a reset must not draw.
        record_states: note the `state_key()` that each turn begins in.
        blank_images: show grey images, to measure what an agent does that sees nothing.
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
        self._idle: list[gymnasium.Env[Any, Any]] = []

    def make(self) -> gymnasium.Env[Any, Any]:
        """Create an environment."""
        return self._make(**self.kwargs)

    def open(self, starts: Sequence[EpisodeSpec]) -> list[EnvironmentSlot]:
        """Return an environment at its first observation for each start; a failed reset leaves the error on its environment."""
        slots = [
            EnvironmentSlot(env=self._idle.pop() if self._idle else self.make(), start=start)
            for start in starts
        ]
        outcomes = run_guarded(
            [_Job(self._reset, slot) for slot in slots], timeout_s=self.timeout_s
        )
        for slot, outcome in zip(slots, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                slot.error = _describe(outcome)
        return slots

    def step(
        self, slots: Sequence[EnvironmentSlot], responses: Sequence[ParsedResponse]
    ) -> list[TurnResult]:
        """Carry out one response in each environment."""
        jobs = [
            _Job(self._turn, slot, response)
            for slot, response in zip(slots, responses, strict=True)
        ]
        results = run_guarded(jobs, timeout_s=self.timeout_s)
        return [
            TurnResult(status=EpisodeStatus.FAILED, error=_describe(result))
            if isinstance(result, BaseException)
            else result
            for result in results
        ]

    def close(self, slots: Sequence[EnvironmentSlot]) -> None:
        """Take sound environments back for later episodes."""
        self._idle.extend(slot.env for slot in slots if slot.error is None)

    def _reset(self, slot: EnvironmentSlot) -> None:
        start, environment = slot.start, slot.env.unwrapped
        options = dict(start.options) if start.options else None
        raw, _ = slot.env.reset(seed=start.seed, options=options)
        draw = 0
        while self.held_out and _call(environment, "state_key") in self.held_out:
            draw += 1
            if draw > _DRAWS:
                raise RuntimeError(
                    f"{_DRAWS} starts in a row are held out; the environment is too small for its validation set"
                )
            raw, _ = slot.env.reset(seed=derive_seed(start.seed, "redraw", draw), options=options)
        slot.difficulty = _call(environment, "difficulty")
        self.look(slot, raw)

    def look(self, slot: EnvironmentSlot, raw: object) -> None:
        """Take an environment's observation into its environment.

        Raises:
            TypeError: it is neither text nor text with an image.
        """
        environment = slot.env.unwrapped
        slot.observation = self._observation(raw)
        slot.action_names = environment.action_names  # type: ignore[attr-defined]
        slot.truth = _call(environment, "describe")
        if self.record_states:
            slot.state = _call(environment, "state_key")
        if self.prompt_format.statements:
            slot.relations = _call(environment, "relations")

    def _observation(self, raw: object) -> Observation:
        if isinstance(raw, str):
            return Observation(text=_encodable(raw))
        if isinstance(raw, Mapping) and isinstance(raw.get("text"), str) and "image" in raw:
            image = np.asarray(raw["image"])
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
                raise TypeError(
                    f"{self.target} returned an image of shape {image.shape} and type {image.dtype}; "
                    "expected uint8 [height, width, 3]"
                )
            # a copy, for an environment may draw its next image into the same array
            image = np.full_like(image, 128) if self.blank_images else image.copy()
            return Observation(text=_encodable(raw["text"]), images=[image])
        raise TypeError(
            f"{self.target} returned an observation of type {type(raw).__name__}; "
            "expected a str, or a dict with 'text' (str) and 'image' (uint8 [height, width, 3])"
        )

    def _turn(self, slot: EnvironmentSlot, response: ParsedResponse) -> TurnResult:
        slot.turn += 1
        result, before = TurnResult(), slot.relations
        if not response.valid:
            result.reward_terms["format"] = -self.format_penalty
            result.status = EpisodeStatus.TERMINATED if self.invalid_ends else None
            result.observation = slot.observation
        for action in response.actions:
            self._act(slot, action, result)
            if result.status is not None:
                break
        if response.valid and before is not None:
            result.statements = _statements(slot, response, before=before)
        if result.status is None and slot.turn >= self.max_turns:
            result.status = (
                EpisodeStatus.TRUNCATED if self.turn_limit_bootstraps else EpisodeStatus.TURN_LIMIT
            )
        return result

    def _act(self, slot: EnvironmentSlot, action: int, result: TurnResult) -> None:
        """Carry out one action and add what came of it to the turn's result."""
        raw, reward, terminated, truncated, info = slot.env.step(action)
        if not abs(float(reward)) < _MOST:
            raise ValueError(f"{self.target} returned reward {reward}; expected a finite number")
        parts = result.reward_terms
        parts["environment"] = parts.get("environment", 0.0) + float(reward)
        result.carried_out.append(slot.action_names[action])
        result.effective |= bool(info.get("action_is_effective", True))
        result.success, result.info = bool(info.get("success", False)), dict(info)
        self.look(slot, raw)
        result.observation = slot.observation
        if terminated or truncated:
            result.status = EpisodeStatus.TERMINATED if terminated else EpisodeStatus.TRUNCATED


def _statements(
    slot: EnvironmentSlot, response: ParsedResponse, *, before: list[Relation]
) -> list[Statement]:
    """Return what a response says of the state, beside the truth before or after its actions."""
    names = tuple(getattr(slot.env.unwrapped, "relation_names", ())) or tuple(
        dict.fromkeys(name for name, *_ in before)
    )
    found = []
    for part, text in response.statements.items():
        truth = slot.relations or [] if part == PREDICTION else before
        agreement = f1(read(text, names), claims_of(truth))
        found.append(Statement(part=part, text=text, truth=truth, names=names, agreement=agreement))
    return found


def environment_maker(target: str) -> Callable[..., gymnasium.Env[Any, Any]]:
    """Return what creates the environment that `target` names: a gymnasium id or a class path.

    Raises:
        ValueError: nothing goes by that name.
    """
    if "/" in target or target in gymnasium.registry:
        return lambda **kwargs: gymnasium.make(target, disable_env_checker=True, **kwargs)
    from hydra.utils import get_class

    try:
        return get_class(target)
    except Exception as error:
        raise ValueError(
            f"env.target={target!r} names no environment ({error}); give a gymnasium id or a class path such as "
            "'envs.frozen_lake.FrozenLake'"
        ) from error


class _Job:
    """A call to be made later; unlike a lambda in a loop it holds its own arguments."""

    __slots__ = ("arguments", "function")

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __call__(self) -> Any:
        return self.function(*self.arguments)


def _encodable(text: str) -> str:
    """Return the text, which no tokenizer could read with half a surrogate pair in it.

    Raises:
        UnicodeEncodeError: there is one.
    """
    text.encode()
    return text


def _call(environment: object, name: str) -> Any:
    method = getattr(environment, name, None)
    return method() if method is not None else None


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
