"""Kuhn poker, its equilibrium, and the exploitability of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import permutations

import numpy as np
from gymnasium import spaces

from .base import TEXT_CHARSET, Observation
from .two_player import SEATS, TwoPlayerGame

PASS, BET = 0, 1
CARDS = ("J", "Q", "K")
_DECK = len(CARDS)
_LETTERS = "pb"
# histories of the moves in which each seat decides
HISTORIES = (("", "pb"), ("p", "b"))
_ENDS = ("pp", "bp", "bb", "pbp", "pbb")
_WORDS = {"p": "passed", "b": "bet"}

Strategy = Mapping[tuple[int, str], float]
"""Probability of Bet at each of the 12 information sets (card, history of the moves)."""


class KuhnPoker(TwoPlayerGame):
    """Bet or pass with one hidden card of three (Kuhn, 1950, A Simplified Two-Person Poker).

    ## Description
    Each player antes 1 and gets one of the cards J, Q and K. They pass or bet 1 in turn. A bet is answered by Bet,
    which calls it, or by Pass, which gives up the pot. Else the higher card wins it. In equilibrium the first seat
    loses 1/18 a game.

    ## Action Space
    `Discrete(2)`: Pass, Bet.

    ## Observation Space
    `Text`: the seat's card and the moves so far, such as `you second with K, first bet`.

    ## Rewards
    What the seat wins or loses: -2, -1, 1 or 2. The rewards of the two seats sum to 0.

    ## Episode End
    Terminated after two or three moves.

    ## Information
    `success`: the seat that moved won. `action_is_effective`: always true. With two seats, `seat_rewards` and
    `seat_success` of each.

    ## Arguments
    `opponent` in training and `validation_opponent` in validation: `random`, or `optimal`, who plays `equilibrium`;
    None for two seats. The option `seat` of a reset is the player's beside an opponent.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    action_names = ("Pass", "Bet")
    seat_names = ("first", "second")
    frequent_words = ("you", "first", "second", "with", "passed", "bet", *CARDS, *action_names)
    instructions = (
        "You play Kuhn poker for a pot of 2, one from each player, with a card of J, Q and K, of which K is the "
        "highest. Answer Pass or Bet; a bet adds 1. After a bet, Bet calls it and Pass gives up the pot. Otherwise the "
        "higher card wins the pot."
    )

    def __init__(
        self,
        *,
        opponent: str | None = None,
        validation_opponent: str | None = "optimal",
        render_mode: str | None = None,
    ) -> None:
        super().__init__(
            opponent=opponent, validation_opponent=validation_opponent, render_mode=render_mode
        )
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Text(max_length=60, charset=TEXT_CHARSET)
        self.cards, self.history = (0, 1), ""

    def observe(self, seat: int) -> Observation:
        """Return the seat's card and all moves."""
        moves = [
            f", {self.seat_names[number % SEATS]} {_WORDS[move]}"
            for number, move in enumerate(self.history)
        ]
        return f"you {self.seat_names[seat]} with {CARDS[self.cards[seat]]}{''.join(moves)}"

    def legal_actions(self) -> list[int]:
        """Return both actions."""
        return [PASS, BET]

    def describe(self) -> str:
        """Return how many of the two other cards are lower: `beats 1 of 2`."""
        return f"beats {self.cards[self.mover]} of 2"

    def difficulty(self) -> int:
        """Return 1 for K to 3 for J."""
        return _DECK - self.cards[self.mover]

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return an action of `equilibrium`."""
        bet = equilibrium()[self.cards[self.mover], self.history]
        return BET if rng.random() < bet else PASS

    def _deal(self) -> None:
        first, second = self.np_random.choice(_DECK, size=SEATS, replace=False)
        self.cards, self.history, self.mover = (int(first), int(second)), "", 0

    def _move(self, action: int) -> None:
        self.history += _LETTERS[action]
        if self.history in _ENDS:
            won = payoff(self.cards, self.history)
            self.rewards = (won, -won)
        else:
            self.mover = 1 - self.mover


def payoff(cards: tuple[int, int], history: str) -> float:
    """Return the reward of the first seat at the end of a game.

    >>> [payoff((2, 0), "bb"), payoff((2, 0), "pbp"), payoff((0, 1), "pp"), payoff((0, 1), "bp")]
    [2.0, -1.0, -1.0, 1.0]
    """
    if history.endswith("bp"):
        return 1.0 if len(history) % 2 == 0 else -1.0
    stake = 2.0 if history.endswith("bb") else 1.0
    return stake if cards[0] > cards[1] else -stake


def equilibrium(*, bluff: float = 1 / 9) -> dict[tuple[int, str], float]:
    """Return an equilibrium, of which there is one for each `bluff` from 0 to 1/3.

    Args:
        bluff: Probability that the first seat bets with J; with K it bets three times as often.

    Raises:
        ValueError: `bluff` is outside of this range.
    """
    if not 0 <= bluff <= 1 / 3:
        raise ValueError(f"bluff: found {bluff}, expected a number from 0 to 1/3")
    jack, queen, king = range(_DECK)
    return {
        (jack, ""): bluff, (queen, ""): 0.0, (king, ""): 3 * bluff,
        (jack, "pb"): 0.0, (queen, "pb"): bluff + 1 / 3, (king, "pb"): 1.0,
        (jack, "p"): 1 / 3, (queen, "p"): 0.0, (king, "p"): 1.0,
        (jack, "b"): 0.0, (queen, "b"): 1 / 3, (king, "b"): 1.0,
    }  # fmt: skip


def game_value(strategy: Strategy) -> float:
    """Return the mean reward of the first seat where both seats play a strategy."""
    return sum(
        _played(deal, "", lambda seat, card, history: strategy[card, history]) for deal in _deals()
    ) / len(list(_deals()))


def best_response_value(
    strategy: Strategy, *, seat: int, gives_up: Strategy | None = None
) -> float:
    """Return the mean reward of a seat that plays best against a strategy of the other.

    Its four decisions by card and history are few enough to enumerate: 2^2 for each card.
    """
    total = 0.0
    for card in range(_DECK):
        deals = [deal for deal in _deals() if deal[seat] == card]
        values = []
        for plan in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)):
            bets = dict(zip(HISTORIES[seat], plan, strict=True))

            def bet(mover: int, own: int, history: str, bets: dict[str, float] = bets) -> float:
                return bets[history] if mover == seat else strategy[own, history]

            def lost(mover: int, own: int, history: str) -> float:
                return 0.0 if mover == seat or gives_up is None else gives_up[own, history]

            values.append(sum(_played(deal, "", bet, lost) for deal in deals))
        total += max(values) if seat == 0 else -min(values)
    return total / len(list(_deals()))


def exploitability(strategy: Strategy, *, gives_up: Strategy | None = None) -> float:
    """Return the mean over seats of what a best response gains: 0 in equilibrium, 0.458 for the uniform strategy.

    Half of NashConv (Lanctot et al., 2017, section 2), since the value of the game to the two seats sums to 0.

    Args:
        strategy: Probability of Bet at each information set.
        gives_up: Probability of a response without a move, which gives up the pot (`forfeit`), at each; `strategy` is
            then that among the others. None for 0.

    Raises:
        ValueError: An information set is missing, or a probability is outside of [0, 1].

    Examples:
        >>> round(exploitability(dict.fromkeys(information_sets(), 0.5)), 3)
        0.458
    """
    missing = [key for key in information_sets() if key not in strategy]
    if missing:
        raise ValueError(f"strategy: has no probability for (card, history) {missing[0]}")
    chances = {"strategy": (strategy, "Bet"), "gives_up": (gives_up or {}, "giving up")}
    for name, (given, of) in chances.items():
        for key, chance in given.items():
            if not 0 <= chance <= 1:
                raise ValueError(f"{name}: found {chance} at {key}, expected a probability of {of}")
    values = [best_response_value(strategy, seat=seat, gives_up=gives_up) for seat in range(SEATS)]
    return sum(values) / SEATS


def information_sets() -> list[tuple[int, str]]:
    """Return the card and the history of each of the 12 decisions."""
    return [(card, history) for own in HISTORIES for history in own for card in range(_DECK)]


def _deals() -> Iterator[tuple[int, int]]:
    yield from permutations(range(_DECK), SEATS)


def _played(
    cards: tuple[int, int],
    history: str,
    bet: Callable[[int, int, str], float],
    lost: Callable[[int, int, str], float] = lambda mover, card, history: 0.0,
) -> float:
    """Return the first seat's mean reward from a history on, by the chances to bet and to give up the pot."""
    if history in _ENDS:
        return payoff(cards, history)
    mover = len(history) % SEATS
    chance = bet(mover, cards[mover], history)
    given_up = lost(mover, cards[mover], history)
    passed, raised = (_played(cards, f"{history}{move}", bet, lost) for move in _LETTERS)
    moved = (1 - chance) * passed + chance * raised
    return (1 - given_up) * moved + given_up * (-1.0 if mover == 0 else 1.0)
