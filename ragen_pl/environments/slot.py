"""An episode to play, the environment that plays it with its answers, and the result of a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from ragen_pl.base.error_text import named_error
from ragen_pl.environments.answers import AnswerReader, Step
from ragen_pl.environments.members import EnvironmentMembers
from ragen_pl.environments.workers import TimeLimitExceeded
from ragen_pl.trajectory import (
    AnswerOutcome,
    EpisodeStatus,
    FailureCause,
    Observation,
    Relation,
    Statement,
)


@dataclass(kw_only=True, slots=True)
class EpisodeSpec:
    """Episode to play. Members of a group share a seed and so an initial state.

    Attributes:
        group: Index of the group.
        member: Index in the group.
        seed: Seed of the environment's reset.
        options: Options of the reset.
        held_out: Whether it begins in a state of the held-out fraction (`EnvironmentManager`); None for any state.
        environment: Name of the environment in a mixture; None where there is one environment.
    """

    group: int
    member: int
    seed: int
    options: Mapping[str, object] | None = None
    held_out: bool | None = None
    environment: str | None = None


@dataclass(kw_only=True, slots=True)
class TurnResult:
    """Outcome of a turn's actions.

    Attributes:
        observation: What the environment shows next.
        reward_terms: Terms `environment` and `format`; a named part of the environment's reward is
            `environment/<name>`.
        statements: Statements of the response, with the true relations.
        valid: Whether the environment took every action as valid.
        status: How the episode ended; None while it runs.
        success: Whether the task is solved; None where the environment does not say so.
        effective: Whether an action changed the environment.
        actions: Names or texts of the actions carried out.
        info: What the last step returned in addition to the observation.
        error: The environment's error.
        answer: What came of the answer to a program's request.
        seat_rewards: Reward of each seat, empty where there is one.
        seat_success: Whether each seat has solved its task, empty where there is one.
        user_errors: Errors in each turn of a simulated user.
    """

    observation: Observation | None = None
    reward_terms: dict[str, float] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    valid: bool = True
    status: EpisodeStatus | None = None
    success: bool | None = None
    effective: bool = False
    actions: list[str] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    answer: AnswerOutcome = field(default_factory=AnswerOutcome)
    seat_rewards: list[float] = field(default_factory=list)
    seat_success: list[bool] = field(default_factory=list)
    user_errors: list[list[str]] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class EnvironmentSlot:
    """One running environment with the present state of its episode.

    Attributes:
        env: The environment.
        worker: Number of its thread.
        spec: The episode.
        observation: The latest observation.
        action_names: Name of each action, by index; None where actions are free text.
        state_key: Key of the present state, where it is recorded.
        potential: Potential of the present state, where it is recorded.
        plan: Plan in the present state, where it is recorded.
        state_description: The environment's description of the present state.
        relations: Positions of things, in formats that ask for statements.
        reward_range: Lowest and highest reward of a step, where they are declared.
        difficulty: Difficulty of the initial state.
        turn: Number of turns played, those of all seats.
        seats: Number of seats, each with a conversation of its own.
        seat: The seat that is to move.
        user_seat: The seat of a simulated user; None where the policy plays none.
        seat_observations: What each seat sees, where there are several.
        error: The environment's error; a slot with an error is not used again.
        cause: What that error is blamed on.
        hangs: Whether that was the time limit.
    """

    env: gymnasium.Env[Any, Any]
    spec: EpisodeSpec
    worker: int = 0
    observation: Observation | None = None
    action_names: Sequence[str] | None = ()
    state_key: str | None = None
    potential: float | None = None
    plan: str | None = None
    state_description: str | None = None
    relations: list[Relation] | None = None
    reward_range: tuple[float, float] | None = None
    difficulty: int | None = None
    turn: int = 0
    seats: int = 1
    seat: int = 0
    user_seat: int | None = None
    seat_observations: list[Observation] = field(default_factory=list)
    error: str | None = None
    cause: FailureCause | None = None
    hangs: bool = False

    @property
    def awaits_answer(self) -> bool:
        """Whether the environment is a program that waits for the answer to a request."""
        return self.observation is not None and self.observation.request is not None

    def action_text(self, action: int | str) -> str:
        """Return the name of an action, or the text of a free one."""
        if isinstance(action, str):
            return action
        assert self.action_names is not None
        return self.action_names[action]

    def fail(self, error: BaseException) -> None:
        """Record the error of a reset or a turn."""
        from ragen_pl.environments.causes import cause_of

        self.error = named_error(error)
        self.cause = cause_of(error)
        self.hangs = isinstance(error, TimeLimitExceeded)

    @property
    def members(self) -> EnvironmentMembers:
        """Members of the environment beyond gymnasium's interface."""
        return EnvironmentMembers(self.env)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotReader:
    """Read the answers of environments into slots, each in the thread of its environment.

    All methods raise TypeError or ValueError where an answer or a member breaks the protocol.

    Attributes:
        answers: Reads the answers.
        states: Whether `state_key()` is recorded.
        relations: Whether the positions of things are read.
        potentials: Whether `potential()` is recorded.
        plans: Whether `plan()` is recorded.
    """

    answers: AnswerReader
    states: bool
    relations: bool
    potentials: bool = False
    plans: bool = False

    def begin(self, slot: EnvironmentSlot, answer: object) -> None:
        """Read the answer of a reset into a slot."""
        raw, members = self.answers.reset(answer), slot.members
        slot.reward_range = members.reward_range
        slot.difficulty = members.difficulty()
        slot.seats = members.seats
        slot.user_seat = members.user_seat if slot.seats > 1 else None
        self._observe(slot, raw)

    def take(self, slot: EnvironmentSlot, answer: object, *, mover: int) -> Step:
        """Read the answer of a step of the seat `mover` into a slot, and return it."""
        step = self.answers.step(
            answer, reward_range=slot.reward_range, seats=slot.seats, mover=mover
        )
        self._observe(slot, step.raw)
        return step

    def _observe(self, slot: EnvironmentSlot, raw: object) -> None:
        members = slot.members
        slot.observation = self.answers.observation(raw)
        if slot.seats > 1:
            slot.seat = members.to_move()
            slot.seat_observations = [
                self.answers.observation(members.observe(seat)) for seat in range(slot.seats)
            ]
            slot.observation = slot.seat_observations[slot.seat]
        slot.action_names = members.action_names
        slot.state_description = members.describe()
        if self.states:
            slot.state_key = members.state_key()
        if self.potentials:
            slot.potential = members.potential()
        if self.plans:
            slot.plan = members.plan()
        if self.relations:
            slot.relations = members.relations()
