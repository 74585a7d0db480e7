"""Blackjack for one hand: hit or stand against a dealer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from gymnasium import spaces

from .base import TEXT_CHARSET, Environment, Observation, checked_arguments

HIT, STAND = 0, 1
# an endless deck: ace to nine once in thirteen each, ten four times
CARDS = (*range(1, 10), 10, 10, 10, 10)
_MAX_SUM, _DEALER_STANDS = 21, 17


class Blackjack(Environment):
    """Draw cards up to 21 and come closer to it than the dealer.

    ## Description
    Cards count their number, pictures 10, an ace 11 or 1. The dealer shows one card and draws up to 17. Cards come
    from an endless deck. A hand of two cards has no bonus.

    ## Action Space
    `Discrete(2)`: Hit, Stand.

    ## Observation Space
    `Text`: `you 15 hard dealer 10`, after Stand `you 15 hard dealer draws 20`. A hand with an ace that counts 11 is
    soft.

    ## Rewards
    1 for a win, 0 for a draw, -1 for a loss.

    ## Episode End
    Terminated by Stand, or above 21.

    ## Information
    `success`: a win. `action_is_effective`: always true.

    ## Trivial Policies
    Chance decides most hands: over 512 hands, drawing below 13, whatever the dealer shows, has success at most 0.45
    and return at most 0.02, and so has always Stand; always Hit and random play have less. In the long run the best
    policy has success 0.43 and return -0.05, drawing below 13 has 0.41 and -0.10.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    action_names = ("Hit", "Stand")
    frequent_words = ("you", "hard", "soft", "dealer", "ace", "of", "lose", *action_names)
    instructions = (
        "You play blackjack. Cards count their number, pictures 10, an ace 11 or 1. You hold the sum of your cards; "
        "it is soft while an ace in it counts 11. Hit draws a card, above 21 you lose. Stand ends your hand: then the "
        "dealer, of whom you see one card, draws up to 17 and loses above 21. Else the sum that is closer to 21 wins."
    )

    @checked_arguments
    def __init__(self, *, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Text(max_length=40, charset=TEXT_CHARSET)
        # sum of the cards with aces as 1, and whether there is an ace
        self.card_sum, self.has_ace, self.dealer_card = 12, False, 10
        # the dealer's final sum
        self._dealt: int | None = None

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Deal two cards to the player and one to the dealer."""
        self._begin(seed=seed, options=options)
        self._dealt = None
        cards = [self._card(), self._card()]
        self.card_sum, self.has_ace, self.dealer_card = sum(cards), 1 in cards, self._card()
        return self._observation(), {}

    def step(self, action: int | np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Draw a card, or let the dealer draw."""
        if self._take(action) == HIT:
            card = self._card()
            self.card_sum, self.has_ace = self.card_sum + card, self.has_ace or card == 1
            self._over = self.card_sum > _MAX_SUM
            reward = -1.0 if self._over else 0.0
        else:
            self._over = True
            self._dealt, own = self._dealer(), total(self.card_sum, self.has_ace)
            reward = 1.0 if self._dealt > _MAX_SUM else float(np.sign(own - self._dealt))
        info = {"success": reward > 0, "action_is_effective": True}
        return self._observation(), reward, self._over, False, info

    def state_key(self) -> str:
        """Return the player's cards and the dealer's card."""
        return self._observation()

    def describe(self) -> str:
        """Return how many of the thirteen cards would lose the hand: `10 of 13 lose`."""
        return f"{sum(self.card_sum + card > _MAX_SUM for card in CARDS)} of 13 lose"

    def difficulty(self) -> int:
        """Return the dealer's card, 1 for an ace."""
        return self.dealer_card

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return the action with the higher expected reward."""
        hit, stand = action_values(self.card_sum, self.has_ace, self.dealer_card)
        return HIT if hit > stand else STAND

    def render(self) -> str:
        """Return the last observation (`render_mode="ansi"`)."""
        return self._observation()

    def _observation(self) -> str:
        own = total(self.card_sum, self.has_ace)
        soft = "soft" if own != self.card_sum else "hard"
        dealer = "ace" if self.dealer_card == 1 else str(self.dealer_card)
        return (
            f"you {own} {soft} dealer {dealer if self._dealt is None else f'draws {self._dealt}'}"
        )

    def _card(self) -> int:
        return CARDS[int(self.np_random.integers(len(CARDS)))]

    def _dealer(self) -> int:
        hand, ace = self.dealer_card, self.dealer_card == 1
        while total(hand, ace) < _DEALER_STANDS:
            card = self._card()
            hand, ace = hand + card, ace or card == 1
        return total(hand, ace)


def total(hand: int, ace: bool) -> int:
    """Return the value of a hand whose aces count 1 in `hand`.

    >>> [total(7, True), total(12, True)]
    [17, 12]
    """
    return hand + 10 if ace and hand + 10 <= _MAX_SUM else hand


@cache
def _dealer_totals(hand: int, ace: bool) -> dict[int, float]:
    """Return the probability of each final value of the dealer."""
    value = total(hand, ace)
    if value >= _DEALER_STANDS:
        return {value: 1.0}
    totals: dict[int, float] = {}
    for card in CARDS:
        for final, chance in _dealer_totals(hand + card, ace or card == 1).items():
            totals[final] = totals.get(final, 0.0) + chance / len(CARDS)
    return totals


@cache
def action_values(hand: int, ace: bool, shown: int) -> tuple[float, float]:
    """Return the expected rewards of Hit and Stand, by dynamic programming over the endless deck.

    Args:
        hand: Sum of the player's cards, aces as 1.
        ace: Whether there is an ace among them.
        shown: The dealer's card.
    """
    own = total(hand, ace)
    stand = sum(
        chance * (1.0 if final > _MAX_SUM else float(np.sign(own - final)))
        for final, chance in _dealer_totals(shown, shown == 1).items()
    )
    hit = 0.0
    for card in CARDS:
        after = hand + card
        value = -1.0 if after > _MAX_SUM else max(action_values(after, ace or card == 1, shown))
        hit += value / len(CARDS)
    return hit, stand
