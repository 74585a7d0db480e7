"""Games of TextArena for one player as an environment."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from ..adapters.optional import optional_import
from ..base import Count, Environment, Observation, checked_arguments

# The games draw from the global generator of `random`.
_GLOBAL_RANDOM = threading.RLock()
_WON = 1.0


@dataclass(frozen=True, kw_only=True)
class Game:
    """Rules and policies of a game.

    Attributes:
        rules: Rules in full sentences; they replace the library's prompt.
        random: A random valid move of a game.
        policy: The best moves of a game in its present state.
    """

    rules: str
    random: Callable[[Any, np.random.Generator], str]
    policy: Callable[[Any], list[str]]


def _random_guess(game: Any, rng: np.random.Generator) -> str:
    return f"[{int(rng.integers(game.min_number, game.max_number + 1))}]"


def _bisect(game: Any) -> list[str]:
    low, high = game.min_number, game.max_number
    for guess, hint in game.state.game_state["guess_history"]:
        low, high = (low, min(high, guess - 1)) if hint == "lower" else (max(low, guess + 1), high)
    return [f"[{(low + high) // 2}]"]


def _codes(game: Any) -> Iterator[tuple[int, ...]]:
    digits = range(1, game.num_numbers + 1)
    if game.duplicate_numbers:
        return itertools.product(digits, repeat=game.code_length)
    return itertools.permutations(digits, game.code_length)


def _random_code(game: Any, rng: np.random.Generator) -> str:
    # all codes of a large game would be millions
    digits = rng.choice(game.num_numbers, game.code_length, replace=game.duplicate_numbers) + 1
    return _code_text(tuple(digits.tolist()))


def _code_text(code: tuple[int, ...]) -> str:
    return f"[{' '.join(map(str, code))}]"


def _pegs(code: tuple[int, ...], guess: tuple[int, ...]) -> tuple[int, int]:
    black = sum(left == right for left, right in zip(code, guess, strict=True))
    common = sum(min(code.count(digit), guess.count(digit)) for digit in set(guess))
    return black, common - black


def _consistent_codes(game: Any) -> list[str]:
    """Return the codes that agree with all answers so far."""
    history = [
        (tuple(entry["guess"]), (entry["black"], entry["white"]))
        for entry in game.state.game_state["history"]
    ]
    return [
        _code_text(code)
        for code in _codes(game)
        if all(_pegs(code, guess) == pegs for guess, pegs in history)
    ]


def _hanoi_moves(game: Any) -> list[str]:
    towers = game.state.game_state["towers"]
    return [
        f"[{source} {target}]"
        for source, target in itertools.permutations(towers, 2)
        if towers[source] and (not towers[target] or towers[target][-1] > towers[source][-1])
    ]


def _random_hanoi_move(game: Any, rng: np.random.Generator) -> str:
    moves = _hanoi_moves(game)
    return moves[int(rng.integers(len(moves)))]


def _hanoi_best(game: Any) -> list[str]:
    """Return the move of the shortest solution from any position."""
    towers = game.state.game_state["towers"]
    place = {disk: name for name, disks in towers.items() for disk in disks}
    target, move = "C", ""
    for disk in sorted(place, reverse=True):
        if place[disk] != target:
            move = f"[{place[disk]} {target}]"
            target = next(name for name in "ABC" if name not in (place[disk], target))
    return [move]


GAMES = {
    "GuessTheNumber": Game(
        rules=(
            "Guess a secret number from 1 to 20 in at most 10 guesses. After each guess you hear whether the number is "
            "higher or lower. Write a guess in square brackets: [5]."
        ),
        random=_random_guess,
        policy=_bisect,
    ),
    "Mastermind": Game(
        rules=(
            "Find a secret code of four different digits from 1 to 6. After each guess you hear the number of "
            "black pegs, one for each right digit in its right place, and of white pegs, one for each right digit"
            " in a wrong place. Write a guess in square brackets: [2 1 4 5]."
        ),
        random=_random_code,
        policy=_consistent_codes,
    ),
    "TowerOfHanoi": Game(
        rules=(
            "Bring all disks from tower A to tower C. You move the last disk of a tower's list onto another "
            "tower, never onto a smaller disk. Write the two towers in square brackets: [A C]."
        ),
        random=_random_hanoi_move,
        policy=_hanoi_best,
    ),
}


class TextArena(Environment):
    """Play a game of TextArena for one player.

    ## Description
    A game of the library TextArena. An observation holds what is new since the last move.

    ## Action Space
    `Text(max_action_length)`: a move in the game's form; one without square brackets is put into them.

    ## Observation Space
    `Text`: the game's messages. The prompt is left out where the rules are known.

    ## Starting State
    As the game draws it.

    ## Rewards
    1 for a won game, 0 otherwise; with `partial` what the game pays at its end for a part of the way. That part can
    be earned by
    giving up early.

    ## Trivial Policies
    In `env=textarena`, guessing 1, 2, 3 and so on has success at most 0.65: ten guesses are half of the numbers.

    ## Episode End
    Terminated as the game says: it is won, its limit of moves is reached, or two moves in a row were invalid.

    ## Information
    `success`: the game is won. `action_is_valid`: the game has taken the move.

    ## Arguments
    - `game`: name of the game without version, such as `Mastermind`. `version`: the rest of its id, such as `-hard`.
    - `settings`: the game's own arguments. `partial`: see above.
    """

    needs_trust = ("settings",)

    frequent_words = ("The target number is", "higher", "lower", "move")

    @checked_arguments
    def __init__(
        self,
        *,
        game: str = "GuessTheNumber",
        version: str = "",
        settings: Mapping[str, Any] | None = None,
        partial: bool = False,
        max_action_length: Count = 200,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        library = optional_import("textarena", extra="textarena")
        known = library.envs.registration.ENV_REGISTRY
        name = f"{game}-v0{version}-raw"
        if name not in known:
            names = sorted(key.removesuffix("-v0") for key in known if key.endswith("-v0"))
            raise ValueError(
                f"game: found {game!r} with version {version!r}, expected one of {', '.join(names)}"
            )
        self.game = library.make(name, **dict(settings or {}))
        self.partial, self._known, self._kinds = partial, GAMES.get(game), library.ObservationType
        with _GLOBAL_RANDOM, _kept():
            try:
                self.game.reset(num_players=1, seed=0)
            except Exception as error:
                raise ValueError(f"game={game}: does not begin for one player: {error}") from error
        if not isinstance(self.game.state, library.SinglePlayerState):
            raise ValueError(f"game={game}: is for several players; choose one for one player")
        self.action_space = spaces.Text(max_action_length)
        self.observation_space = spaces.Text(100_000)
        general = "Play the game as its first message says. Write a move in square brackets, as it asks for."
        # those of the game as it is by default
        self._has_rules = self._known is not None and not version and not settings
        self.instructions = self._known.rules if self._known and self._has_rules else general
        self.reward_range = (-1.0, 1.0) if partial else (0.0, 1.0)
        self._generator: Any = None
        self._shown = ""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin a game."""
        self._begin(seed=seed, options=options)
        drawn = int(self.np_random.integers(2**31))
        with _GLOBAL_RANDOM, _kept():
            random.seed(drawn)
            self.game.reset(num_players=1, seed=drawn)
            self._generator = random.getstate()
        self._shown = self._news() or "begin"
        return self._shown, {}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Make a move."""
        text, before = self._take_text(action).strip(), self.state_key()
        move = text if "[" in text else f"[{text}]"
        crashed = False
        with _GLOBAL_RANDOM, _kept():
            random.setstate(self._generator)
            try:
                self.game.step(move)
            # a move that the game cannot read
            except Exception:
                crashed = True
            self._generator = random.getstate()
        state = self.game.state
        refused = crashed or state.error_count > 0 or bool(state.game_info[0]["invalid_move"])
        self._over = crashed or bool(state.done)
        paid = float(state.rewards[0]) if state.done and state.rewards and not crashed else 0.0
        won = paid >= _WON and not refused
        self._shown = (
            self._news() if not self._over else _plain(state.game_info[0].get("reason") or "over")
        )
        info = {
            "success": won,
            "action_is_valid": not refused,
            "action_is_effective": self.state_key() != before,
        }
        return self._shown, paid if self.partial else float(won), self._over, False, info

    def state_key(self) -> str:
        """Return the game's state as text."""
        return f"{self.game.state.turn} {self.game.state.game_state!r}"

    def describe(self) -> str:
        """Return the number of this move: `move 2`."""
        return f"move {self.game.state.turn + 1}"

    def difficulty(self) -> int:
        """Return 1: the episodes of a game count as equally hard."""
        return 1

    def optimal_action(self, rng: np.random.Generator) -> str:
        """Return a best move of a known game.

        Raises:
            NotImplementedError: No policy for the game is known.
        """
        if self._known is None:
            raise NotImplementedError(f"game: only {', '.join(GAMES)} have a policy")
        moves = self._known.policy(self.game)
        return moves[int(rng.integers(len(moves)))]

    def random_action(self, rng: np.random.Generator) -> str:
        """Return a random move of a known game, or a small number."""
        if self._known is None:
            return f"[{int(rng.integers(10))}]"
        return self._known.random(self.game, rng)

    def render(self) -> str:
        """Return the current observation (`render_mode="ansi"`)."""
        return self._shown

    def _news(self) -> str:
        """Return the game's messages since the last call."""
        hidden = {self._kinds.PLAYER_ACTION} | ({self._kinds.PROMPT} if self._has_rules else set())
        _, messages = self.game.get_observation()
        return "\n".join(_plain(text) for _, text, kind in messages if kind not in hidden)


@contextmanager
def _kept() -> Iterator[None]:
    """Restore the state of the global generator at the end."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def _plain(text: str) -> str:
    """Return a message that may quote the player as text that can be encoded."""
    return str(text).strip().encode(errors="replace").decode()
