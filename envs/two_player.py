"""Base of games of two players, each with a seat, an observation and a reward of its own.

Without an opponent the environment has two seats, which a trainer plays in turn (`seats`, `to_move`, `observe`). With
one, a scripted player plays the other seat inside `reset` and `step`, and the environment has one player as any other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np

from .base import Environment, Observation

SEATS = 2


Action: TypeAlias = int | str
"""Index of a named action, or a free text."""
ScriptedPlayer: TypeAlias = Callable[[np.random.Generator], Action]
"""Returns the action of the seat that is to move."""


class TwoPlayerGame(Environment):
    """Game of two players who move one at a time.

    Subclasses write `_deal` and `observe`, with named actions `legal_actions`, `_move` and `optimal_action`, and with
    free text `_play`, `random_action` and `players`. They keep `mover`, and set `rewards` at the end of a game.

    An illegal action changes nothing, and `info["action_is_valid"]` says so; `forfeit` ends the game for who made it.

    Args:
        opponent: Scripted player of the other seat in training; None for two seats.
        validation_opponent: The one in validation (the option `held_out` of a reset), since the returns of two equal
            players say nothing about their play.
    """

    draws_held_out = True
    option_names = ("seat", "held_out")
    seat_names: ClassVar[tuple[str, str]]
    """Name of each seat, the one that moves first before the other."""

    def __init__(
        self,
        *,
        opponent: str | None = None,
        validation_opponent: str | None = "optimal",
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        for key, name in {
            "opponent": opponent,
            "validation_opponent": validation_opponent,
        }.items():
            if name is not None and name not in self.players:
                expected = ", ".join(self.players)
                raise ValueError(f"{key}: found {name!r}, expected null or one of {expected}")
        self._opponents = (opponent, validation_opponent)
        self.opponent = self._opponents[0]
        """Name of the player of the other seat in the present episode."""
        self.held_out: bool | None = None
        """Whether the present episode is one of validation; None where nobody says so."""
        self.seat = 0
        """The player's seat, beside an opponent."""
        self.mover = 0
        """Seat that is to move."""
        self.rewards: tuple[float, float] | None = None
        """Reward of each seat; None while the game runs."""

    @property
    def players(self) -> Mapping[str, ScriptedPlayer]:
        """The scripted players by name."""
        return {"random": self.random_action, "optimal": self.optimal_action}

    @property
    def seats(self) -> int:
        """Number of seats that the trainer plays."""
        return SEATS if self.opponent is None else 1

    def to_move(self) -> int:
        """Return the seat that is to move; after the end of a game, the one that moved last."""
        return self.mover

    @abstractmethod
    def observe(self, seat: int) -> Observation:
        """Return the present observation of a seat."""

    def legal_actions(self) -> list[int]:
        """Return the actions with names that the rules allow."""
        raise NotImplementedError

    @abstractmethod
    def _deal(self) -> None:
        """Begin a game, with `mover`."""

    def _play(self, action: Any) -> bool:
        """Make a move, and pass the turn on or set `rewards`; return whether the rules allow it."""
        legal = action in self.legal_actions()
        if legal:
            self._move(action)
        return legal

    def _move(self, action: int) -> None:
        """Make a legal move with a name, and pass the turn on or set `rewards`."""
        raise NotImplementedError

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin a game. Beside an opponent, the option `seat` (0 or 1) is the player's; without it, it is drawn."""
        options = self._begin(seed=seed, options=options)
        self.held_out = options.get("held_out")
        self.opponent = self._opponents[bool(self.held_out)]
        self.rewards, self.seat = None, self._seat(options)
        self._deal()
        self._reply()
        return self._observation(self.mover), {}

    def _seat(self, options: Mapping[str, Any]) -> int:
        seat = options.get("seat")
        if seat is None:
            return 0 if self.opponent is None else int(self.np_random.integers(SEATS))
        if self.opponent is None:
            raise ValueError(
                f"reset(options=...) of {type(self).__name__}: found seat={seat!r}, but both seats are played; set "
                f"opponent={' or '.join(self.players)}"
            )
        if seat not in (0, 1) or isinstance(seat, bool):
            raise ValueError(
                f"reset(options=...) of {type(self).__name__}: found seat={seat!r}, expected 0 "
                f"({self.seat_names[0]}, moves first) or 1 ({self.seat_names[1]})"
            )
        return int(seat)

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Make a move, and that of an opponent after it. The reward is that of the seat that moved."""
        mover = self.mover
        legal = self._play(self._take(action) if self.action_names else self._take_text(action))
        self._reply()
        return self._answer(mover, legal=legal)

    def forfeit(self, seat: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """End the game as lost for a seat, the player's beside an opponent, without a legal move."""
        if self._over:
            raise RuntimeError(f"{type(self).__name__}: the episode has ended; call reset() first")
        self.steps += 1
        loser = seat if self.opponent is None else self.seat
        self.rewards = self._forfeited(loser)
        return self._answer(loser, legal=False)

    def _forfeited(self, loser: int) -> tuple[float, float]:
        """Return the rewards of a game that a seat has lost without a legal move."""
        return (-1.0, 1.0) if loser == 0 else (1.0, -1.0)

    def _solved(self, reward: float) -> bool:
        """Return whether a seat with a reward has solved its task."""
        return reward > 0

    def _metrics(self) -> dict[str, float]:
        """Return the metrics of a game that has ended."""
        return {}

    def random_action(self, rng: np.random.Generator) -> Action:
        """Return a legal action drawn uniformly."""
        return int(rng.choice(self.legal_actions()))

    def state_key(self) -> str:
        """Return the seat that is to move and all that either seat sees."""
        seen = " | ".join(str(self.observe(seat)) for seat in range(SEATS))
        own = "" if self.opponent is None else f" {self.seat_names[self.seat]}"
        return f"{self.seat_names[self.mover]}{own}: {seen}"

    def render(self) -> str:
        """Return the text of what the seat sees that is to move, or the player beside an opponent (`"ansi"`)."""
        seen = self._observation(self.mover)
        return seen if isinstance(seen, str) else str(seen["text"])

    def _reply(self) -> None:
        """Let the opponent move until it is the player's turn."""
        while self.opponent is not None and self.rewards is None and self.mover != self.seat:
            self._play(self.players[self.opponent](self.np_random))

    def _observation(self, seat: int) -> Observation:
        return self.observe(self.seat if self.opponent is not None else seat)

    def _answer(
        self, mover: int, *, legal: bool
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        rewards = self.rewards or (0.0, 0.0)
        self._over = self.rewards is not None
        info: dict[str, Any] = {
            "success": self._over and self._solved(rewards[mover]),
            "action_is_effective": legal,
            "action_is_valid": legal,
        }
        if self.opponent is None:
            solved = [self._over and self._solved(one) for one in rewards]
            info |= {"seat_rewards": [*rewards], "seat_success": solved}
        if self._over and (metrics := self._metrics()):
            info["metrics"] = metrics
        return self._observation(self.mover), rewards[mover], self._over, False, info
