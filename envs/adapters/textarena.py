"""Games of TextArena for one and for two players as environments."""

from __future__ import annotations

import functools
import itertools
import pprint
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from ..adapters.optional import optional_import
from ..base import Count, Environment, Observation, checked_arguments
from ..two_player import SEATS, ScriptedPlayer, TwoPlayerGame

# The games draw from the global generators of `random` and numpy.
_GLOBAL_RANDOM = threading.RLock()
_WON = 1.0
_GENERAL_RULES = (
    "Play the game as its first message says. Write a move in square brackets, as it asks for."
)
# errors of a game at a move that it cannot read; a connection that fails is none of them
_UNREADABLE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RecursionError, TypeError, ValueError,
)  # fmt: skip
_QUOTED_MOVE = re.compile(r"'(\[[^\[\]']+\])'")


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


class LibraryGame:
    """A game of the library, alone with the global generators from which it draws.

    Args:
        game: Name of the game without version.
        version: The rest of its id.
        settings: The game's own arguments.
        players: Number of players.

    Raises:
        ValueError: The library has no such game, or it does not begin for so many players.
    """

    def __init__(
        self, *, game: str, version: str, settings: Mapping[str, Any] | None, players: int
    ) -> None:
        self._players, self._generators = players, _generators()
        # its import draws too
        with self._drawing():
            self.library = optional_import("textarena", extra="textarena")
        known = self.library.envs.registration.ENV_REGISTRY
        name = f"{game}-v0{version}"
        if f"{name}-raw" not in known:
            names = sorted(key.removesuffix("-v0") for key in known if key.endswith("-v0"))
            raise ValueError(
                f"game: found {game!r} with version {version!r}, expected one of {', '.join(names)}"
            )
        wrappers = known[name].default_wrappers or ()
        self._in_brackets = self.library.wrappers.ActionFormattingWrapper in wrappers
        try:
            with self._drawing():
                self.game = self.library.make(f"{name}-raw", **dict(settings or {}))
            self.reset(0)
        # the library's files for a version of Python, data that it has not downloaded, a key of a service
        except Exception as error:
            shown = " ".join(str(error).replace("*", "").split())
            for_players = f"{players} player{'' if players == 1 else 's'}"
            raise ValueError(f"game={game}: does not begin for {for_players}: {shown}") from error

    @property
    def state(self) -> Any:
        """The library's state of the game."""
        return self.game.state

    def reset(self, seed: int) -> None:
        """Begin a game."""
        with self._drawing():
            random.seed(seed)
            np.random.seed(seed)
            self.game.reset(num_players=self._players, seed=seed)

    def step(self, text: str) -> bool:
        """Make a move, and return whether the game could read it.

        One without square brackets is put into them, where the library does so too.
        """
        text = text.strip()
        with self._drawing():
            try:
                self.game.step(f"[{text}]" if self._in_brackets and "[" not in text else text)
            except _UNREADABLE:
                return False
        return True

    def has_refused(self, player: int) -> bool:
        """Return whether the game refused the latest move, which was this player's."""
        return self.state.error_count > 0 or bool(self.state.game_info[player]["invalid_move"])

    def state_key(self) -> str:
        """Return the game's state as text; the order of its sets and dicts says nothing."""
        return f"{self.state.turn} {pprint.pformat(self.state.game_state, width=10**6)}"

    def outcome(self) -> str:
        """Return why a game has ended."""
        return _plain(self.state.game_info[0].get("reason") or "over")

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        with _GLOBAL_RANDOM:
            others = _generators()
            _set_generators(self._generators)
            try:
                yield
            finally:
                self._generators = _generators()
                _set_generators(others)


def _generators() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


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

    # a game may load data from a network when it is made
    needs_trust = ("game", "version", "settings")

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
        self._running = LibraryGame(game=game, version=version, settings=settings, players=1)
        self.game, library = self._running.game, self._running.library
        self.partial, self._known, self._kinds = partial, GAMES.get(game), library.ObservationType
        if not isinstance(self.game.state, library.SinglePlayerState):
            raise ValueError(f"game={game}: is for several players; choose one for one player")
        self.action_space = spaces.Text(max_action_length)
        self.observation_space = spaces.Text(100_000)
        # those of the game as it is by default
        self._has_rules = self._known is not None and not version and not settings
        self.instructions = self._known.rules if self._known and self._has_rules else _GENERAL_RULES
        self.reward_range = (-1.0, 1.0) if partial else (0.0, 1.0)
        self._shown = ""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin a game."""
        self._begin(seed=seed, options=options)
        self._running.reset(int(self.np_random.integers(2**31)))
        self._shown = self._news() or "begin"
        return self._shown, {}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Make a move."""
        text, before = self._take_text(action), self.state_key()
        crashed = not self._running.step(text)
        state = self.game.state
        refused = crashed or self._running.has_refused(0)
        self._over = crashed or bool(state.done)
        paid = float(state.rewards[0]) if state.done and state.rewards and not crashed else 0.0
        won = paid >= _WON and not refused
        self._shown = self._running.outcome() if self._over else self._news()
        info = {
            "success": won,
            "action_is_valid": not refused,
            "action_is_effective": self.state_key() != before,
        }
        return self._shown, paid if self.partial else float(won), self._over, False, info

    def state_key(self) -> str:
        """Return the game's state as text."""
        return self._running.state_key()

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


def _random_column(game: Any, rng: np.random.Generator) -> str:
    top = game.state.game_state["board"][0]
    free = [column for column, cell in enumerate(top) if cell == "."]
    return f"[col {free[int(rng.integers(len(free)))]}]"


@functools.lru_cache(maxsize=8)
def _words_by_start(dictionary: Any) -> dict[tuple[str, int], list[str]]:
    """Return the words of a game's dictionary by their first letter and their length, in alphabetical order."""
    words: dict[tuple[str, int], list[str]] = {}
    for word in sorted(filter(str.isalpha, dictionary.get_all_words())):
        words.setdefault((word[0], len(word)), []).append(word)
    return words


def _random_word(game: Any, rng: np.random.Generator) -> str:
    state = game.state.game_state
    first, length, used = (
        state[key] for key in ("required_start_letter", "required_length", "used_words")
    )
    words = [
        word
        for word in _words_by_start(game.dictionary).get((first, length), ())
        if word not in used
    ]
    # a player without a word has lost
    return f"[{words[int(rng.integers(len(words)))]}]" if words else "[none]"


RANDOM_MOVES: dict[str, Callable[[Any, np.random.Generator], str]] = {
    "ConnectFour": _random_column,
    "WordChains": _random_word,
}
"""Random valid moves of games of two players that do not list theirs."""


class TextArenaTwoPlayer(TwoPlayerGame):
    """Play a game of TextArena for two players.

    ## Description
    A game of the library TextArena with two seats, numbered as its players. Games for more players are played by two,
    where they allow it.

    ## Action Space
    `Text(max_action_length)`: a move in the game's form. One without square brackets is put into them, where the
    library does so too.

    ## Observation Space
    `Text`: the game's messages since the seat's last move, and what the other player has written. Of several boards it
    is the latest one.

    ## Starting State
    As the game draws it; some games let the second player begin.

    ## Rewards
    What the game pays each player at its end: 1 for a win, -1 for a loss, 0 for a draw; a few games pay amounts between
    them.

    ## Trivial Policies
    Depend on the game. A player whose moves are invalid loses.

    ## Episode End
    Terminated as the game says. By the library's rules a first invalid move is asked again, and a second one in a row
    loses. So does a move that the game cannot read.

    ## Information
    `success`: the seat that moved has a reward above 0. `action_is_valid`: the game has taken the move. With two seats,
    `seat_rewards` and `seat_success` of each.

    ## Arguments
    - `game`: name of the game without version, such as `TicTacToe`. `version`: the rest of its id, such as `-long`.
    - `settings`: the game's own arguments.
    - `opponent` in training and `validation_opponent` in validation: `random`, who draws among the moves that the game
      lists, or those of `RANDOM_MOVES`; None for two seats. The library has no other players but models behind
      interfaces on the web. The option `seat` of a reset is the player's beside an opponent.
    """

    # a game may load data from a network when it is made
    needs_trust = ("game", "version", "settings")

    seat_names = ("Player 0", "Player 1")
    frequent_words = (
        "Player 0",
        "Player 1",
        "Current Board",
        "Available Moves",
        "Your available actions are",
    )
    instructions = _GENERAL_RULES

    @checked_arguments
    def __init__(
        self,
        *,
        game: str = "TicTacToe",
        version: str = "",
        settings: Mapping[str, Any] | None = None,
        opponent: str | None = None,
        validation_opponent: str | None = "random",
        max_action_length: Count = 200,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(
            opponent=opponent, validation_opponent=validation_opponent, render_mode=render_mode
        )
        self._running = LibraryGame(game=game, version=version, settings=settings, players=SEATS)
        self.game, self._kinds = self._running.game, self._running.library.ObservationType
        self.action_space = spaces.Text(max_action_length)
        self.observation_space = spaces.Text(100_000)
        self._random_move = RANDOM_MOVES.get(game)
        self._begin_game(0)
        if (opponent or validation_opponent) and not (self._random_move or self._listed_moves()):
            raise ValueError(
                f"opponent=random, game={game}: the game lists no moves to draw from; set opponent=null and "
                "validation_opponent=null"
            )

    @property
    def players(self) -> Mapping[str, ScriptedPlayer]:
        """The scripted players by name."""
        return {"random": self.random_action}

    def observe(self, seat: int) -> Observation:
        """Return the messages that are new to a seat."""
        if self.rewards is not None:
            return self._running.outcome()
        # those of the seat that waits are still in the library's state
        messages = [*self._news[seat], *self._running.state.observations[seat]]
        boards = [n for n, (_, _, kind) in enumerate(messages) if kind is self._kinds.GAME_BOARD]
        shown = []
        for number, (sender, text, kind) in enumerate(messages):
            is_own = kind is self._kinds.PLAYER_ACTION and sender == seat
            if not is_own and number not in boards[:-1]:
                name = f"{self.seat_names[sender]}: " if sender == 1 - seat else ""
                shown.append(f"{name}{_plain(text)}")
        return "\n".join(shown) or "your turn"

    def state_key(self) -> str:
        """Return the game's state and the seat that is to move as text."""
        own = "" if self.opponent is None else f" {self.seat_names[self.seat]}"
        return f"{self.seat_names[self.mover]}{own}: {self._running.state_key()}"

    def describe(self) -> str:
        """Return the number of this move: `move 2`."""
        return f"move {self._running.state.turn + 1}"

    def difficulty(self) -> int:
        """Return 1: the episodes of a game count as equally hard."""
        return 1

    def random_action(self, rng: np.random.Generator) -> str:
        """Return one of the moves that the game lists, or of `RANDOM_MOVES`, or else a small number."""
        if self._random_move is not None:
            return self._random_move(self.game, rng)
        listed = self._listed_moves()
        return listed[int(rng.integers(len(listed)))] if listed else f"[{rng.integers(10)}]"

    def _listed_moves(self) -> list[str]:
        """Return the moves in quotes of the latest message that has some, the rules aside."""
        for _, text, kind in reversed(self._news[self.mover]):
            if kind is not self._kinds.PROMPT and (moves := _QUOTED_MOVE.findall(text)):
                return moves
        return []

    def _deal(self) -> None:
        self._begin_game(int(self.np_random.integers(2**31)))

    def _begin_game(self, seed: int) -> None:
        self._running.reset(seed)
        self._news: tuple[list[Any], list[Any]] = ([], [])
        self._pass_on()

    def _pass_on(self) -> None:
        """Take the mover from the game, with what is new to it."""
        self.mover, messages = self.game.get_observation()
        self._news[self.mover].extend(messages)

    def _play(self, action: str) -> bool:
        seat = self.mover
        self._news[seat].clear()
        if not self._running.step(action):
            self.rewards = self._forfeited(seat)
            return False
        state = self._running.state
        if state.done:
            paid = state.rewards or {}
            self.rewards = (float(paid.get(0, 0.0)), float(paid.get(1, 0.0)))
        else:
            self._pass_on()
        return not self._running.has_refused(seat)


def _plain(text: str) -> str:
    """Return a message that may quote the player as text that can be encoded."""
    return str(text).strip().encode(errors="replace").decode()
