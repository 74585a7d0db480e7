"""Reward functions that need one trajectory at a time: weights, length, efficiency and placement of rewards.

A reward function changes the named terms of turns in place; a turn's reward is the sum of its terms. The
functions of a run are applied in order, once, right after a rollout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Count, CountOrZero, NonNegative
from ragen_pl.base.finite import NonFiniteError, class_path
from ragen_pl.base.run_facts import RunFacts
from ragen_pl.trajectory import Span, Trajectory, Turn

# what is larger becomes infinite where returns are added up in float32
_LARGEST = 1e30

Gather = Callable[[list[Any]], Sequence[list[Any]]]
"""Returns the lists of all ranks; see `distributed.gather_over_ranks`."""


class RewardFunction(Protocol):
    """Adds terms to the rewards of turns, or changes them."""

    def __call__(self, trajectories: Sequence[Trajectory], *, gather: Gather) -> None:
        """Change `Turn.reward_terms` of a rollout.

        Args:
            trajectories: This rank's trajectories.
            gather: Collects a list from each rank. All ranks call a function at the same time.
        """
        ...


def check_terms(trajectories: Sequence[Trajectory], *, of: RewardFunction) -> None:
    """Check the terms of the rewards after a reward function has changed them.

    Args:
        trajectories: This rank's trajectories.
        of: The reward function, for the message.

    Raises:
        NonFiniteError: A term is no finite number of float32.
    """
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory.turns):
            for name, amount in turn.reward_terms.items():
                if not abs(amount) <= _LARGEST:
                    raise NonFiniteError(
                        f"algorithm.rewards: {class_path(of)} set the term {name} of turn {number} of group "
                        f"{trajectory.group}, member {trajectory.member}, to {amount}; return finite numbers"
                    )


@checked
@dataclass(frozen=True, kw_only=True)
class WeightTerms:
    """Multiply the terms that the environment manager sets.

    Attributes:
        turn: Weight of the `environment` terms before the last turn.
        final: Weight of the `environment` terms of the last turn.
        format: Weight of the `format` term (`env.format_penalty`).
    """

    needs_trust = ()

    turn: float = 1.0
    final: float = 1.0
    format: NonNegative = 1.0

    def __call__(self, trajectories: Sequence[Trajectory], *, gather: Gather) -> None:
        """Weight the terms in place."""
        for trajectory in trajectories:
            for turn in trajectory.turns:
                last = turn is trajectory.turns[-1]
                self._weight(turn, environment=self.final if last else self.turn)

    def _weight(self, turn: Turn, *, environment: float) -> None:
        weights = {"environment": environment, "format": self.format}
        for name in turn.reward_terms:
            turn.reward_terms[name] *= weights.get(name.partition("/")[0], 1.0)


@checked
@dataclass(frozen=True, kw_only=True)
class ThinkLength:
    """Reward the length of the reasoning: term `think_length`.

    Attributes:
        amount: Reward of a reasoning of `high` tokens; negative rewards shorter ones, 0 adds no term.
        low: Number of tokens up to which the reward is 0; from there it grows linearly.
        high: Number of tokens from which it is `amount`.

    Raises:
        ValueError: `low` is not below `high`.
    """

    needs_trust = ()

    amount: float = 0.0
    low: CountOrZero = 0
    high: Count = 16

    def __post_init__(self) -> None:
        """Check the lengths."""
        if self.low >= self.high:
            raise ValueError(
                f"algorithm.rewards.think_length: found low={self.low} and high={self.high}, "
                "expected low < high; change one of them"
            )

    def check_run(self, facts: RunFacts) -> None:
        """Check that responses have a reasoning."""
        if self.amount and "think" not in facts.blocks:
            raise ValueError(
                f"algorithm.rewards.think_length.amount={self.amount}: env.prompt_format={facts.prompt_format} has "
                "no reasoning; set 0"
            )

    def __call__(self, trajectories: Sequence[Trajectory], *, gather: Gather) -> None:
        """Add the term to each turn."""
        if not self.amount:
            return
        for turn in turns_of(trajectories):
            tokens = int((turn.spans == Span.THINK).sum())
            fraction = (tokens - self.low) / (self.high - self.low)
            turn.reward_terms["think_length"] = self.amount * min(1.0, max(0.0, fraction))


@checked
@dataclass(frozen=True, kw_only=True)
class TurnPenalty(ABC):
    """Base of reward functions that penalize some turns.

    Attributes:
        penalty: Amount taken from such a turn; 0 adds no term.
        term: Name of the reward term.
    """

    penalty: NonNegative = 0.0
    term: ClassVar[str]

    @abstractmethod
    def applies(self, turn: Turn) -> bool:
        """Return whether a turn is penalized."""

    def __call__(self, trajectories: Sequence[Trajectory], *, gather: Gather) -> None:
        """Add the term to the turns that are penalized."""
        if not self.penalty:
            return
        for turn in turns_of(trajectories):
            if self.applies(turn):
                turn.reward_terms[self.term] = -self.penalty


@checked
@dataclass(frozen=True, kw_only=True)
class ActionEfficiency(TurnPenalty):
    """Penalize valid actions that change nothing: term `action_efficiency`."""

    needs_trust = ()

    term: ClassVar[str] = "action_efficiency"

    def applies(self, turn: Turn) -> bool:
        """Return whether the turn's valid actions had no effect; a summary has no actions."""
        return turn.is_task_step and turn.action_is_valid and not turn.action_is_effective


@checked
@dataclass(frozen=True, kw_only=True)
class OverlongPenalty(TurnPenalty):
    """Penalize responses that hit their length limit: term `overlong`."""

    needs_trust = ()

    term: ClassVar[str] = "overlong"

    def applies(self, turn: Turn) -> bool:
        """Return whether the turn's response hit its length limit."""
        return turn.hit_length_limit


class RewardPlace(StrEnum):
    """Turn that a reward is given in: the turn that earned it, or the last turn of the episode."""

    TURN = "turn"
    END = "end"


@checked
@dataclass(frozen=True, kw_only=True)
class RewardPlacement:
    """Choose the turn that rewards are given in.

    Attributes:
        place: `turn` leaves terms where they are; `end` adds up each term in the episode's last turn.
    """

    needs_trust = ()

    place: RewardPlace = RewardPlace.TURN

    def __call__(self, trajectories: Sequence[Trajectory], *, gather: Gather) -> None:
        """Move the terms."""
        if self.place is RewardPlace.END:
            for trajectory in trajectories:
                _move_to_last(trajectory.turns)


def turns_of(trajectories: Sequence[Trajectory]) -> list[Turn]:
    """Return the turns that are trained on, trajectory after trajectory; the form of others earns nothing."""
    return [turn for trajectory in trajectories for turn in trajectory.turns if turn.trained]


def _move_to_last(turns: Sequence[Turn]) -> None:
    total: dict[str, float] = {}
    for turn in turns:
        for name, value in turn.reward_terms.items():
            total[name] = total.get(name, 0.0) + value
        turn.reward_terms = {}
    if turns:
        turns[-1].reward_terms = total
