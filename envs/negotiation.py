"""Negotiation about a few items in words (Lewis et al., 2017, Deal or No Deal?, arXiv 1706.05125)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from gymnasium import spaces

from .base import PRINTABLE, Count, Observation, checked_arguments
from .two_player import SEATS, ScriptedPlayer, TwoPlayerGame

ITEMS = ("book", "hat", "ball")
WORTH = 10
"""Value of all items together to each seat."""
_MOST_OF_A_KIND, _FEWEST, _MOST = 4, 5, 7
# of all problems, those of validation are a fifth
_HELD_OUT = 5
_FIRST_WORD = re.compile(r"(\w*)(.*)")
_PAIR = re.compile(r"(\d+) (\w+)")
_AROUND = " .!:,"
_ACCEPT, _PROPOSE = "accept", "propose"

Share = tuple[int, ...]
"""Number of items of each kind in `ITEMS`."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Items to divide, and their private values.

    Attributes:
        counts: Number of items of each kind.
        values: For each seat, the value of one item of each kind; all items are worth `WORTH`.
    """

    counts: Share
    values: tuple[Share, Share]

    def worth(self, seat: int, share: Share) -> int:
        """Return the value of a share to a seat."""
        return sum(value * number for value, number in zip(self.values[seat], share, strict=True))

    def rest(self, share: Share) -> Share:
        """Return the other items."""
        return tuple(count - number for count, number in zip(self.counts, share, strict=True))

    def shares(self) -> list[Share]:
        """Return all shares that a seat can have."""
        return list(product(*(range(count + 1) for count in self.counts)))

    def outcomes(self) -> set[tuple[int, int]]:
        """Return the values of the divisions to the first and the second seat."""
        return {(self.worth(0, share), self.worth(1, self.rest(share))) for share in self.shares()}

    def frontier(self) -> set[tuple[int, int]]:
        """Return the outcomes of which no other is better for one seat and as good for the other (Pareto)."""
        every = self.outcomes()
        return {
            one
            for one in every
            if not any(
                other != one and other[0] >= one[0] and other[1] >= one[1] for other in every
            )
        }

    @property
    def held_out(self) -> bool:
        """Whether it is one of validation."""
        return zlib.crc32(repr((self.counts, self.values)).encode()) % _HELD_OUT == 0


def drawn_problem(rng: np.random.Generator, *, held_out: bool | None = None) -> Problem:
    """Draw a problem: 5 to 7 items, each kind of value to a seat, one to both, and half of the value for both possible.

    The first three are those of Lewis et al. (2017, section 2.1).

    Args:
        rng: Generator.
        held_out: Whether it is one of validation; None for any.
    """
    while True:
        counts = tuple(rng.integers(1, _MOST_OF_A_KIND + 1, size=len(ITEMS)).tolist())
        valuations = _valuations(counts)
        if not _FEWEST <= sum(counts) <= _MOST or not valuations:
            continue
        first, second = (valuations[int(rng.integers(len(valuations)))] for _ in range(SEATS))
        pairs = list(zip(first, second, strict=True))
        if not all(map(any, pairs)) or not any(map(all, pairs)):
            continue
        problem = Problem(counts=counts, values=(first, second))
        if held_out not in (None, problem.held_out):
            continue
        if any(2 * min(outcome) >= WORTH for outcome in problem.outcomes()):
            return problem


@cache
def _valuations(counts: Share) -> list[Share]:
    """Return the values of one item of each kind with which all items are worth `WORTH`."""
    every = product(*(range(WORTH // count + 1) for count in counts))
    return [
        values
        for values in every
        if sum(value * count for value, count in zip(values, counts, strict=True)) == WORTH
    ]


@dataclass(frozen=True, kw_only=True)
class Move:
    """An answer as it was read: a proposal, the acceptance of one, or words.

    Attributes:
        share: What the mover would get by a proposal.
        accepts: Whether it accepts.
        words: A message.
    """

    share: Share | None = None
    accepts: bool = False
    words: str = ""


def read_move(text: str, counts: Share) -> Move:
    """Read an answer.

    `propose 2 books 1 hat` asks for these items and leaves the others; commas and `and` may stand between them.
    `accept` takes the other seat's proposal. A colon or comma may follow the first word, and a full stop or exclamation
    mark may be the end. Whatever does not begin with one of these words is a message.

    Raises:
        ValueError: It begins like a proposal or an acceptance and is none, or asks for items that are not there.
    """
    words = " ".join(text.split())
    first, rest = _FIRST_WORD.findall(words.casefold())[0]
    rest = rest.strip(_AROUND)
    if first == _ACCEPT:
        if rest:
            raise ValueError(f"write {_ACCEPT} alone")
        return Move(accepts=True)
    if first != _PROPOSE:
        return Move(words=words)
    listed = " ".join(word for word in rest.replace(",", " ").split() if word != "and")
    pairs = _PAIR.findall(listed)
    if not pairs or listed != " ".join(f"{number} {kind}" for number, kind in pairs):
        raise ValueError(f"write such as {_PROPOSE} {_listed((2, 1, 0))}")
    share: dict[str, int] = {}
    for number, kind in pairs:
        name = kind.removesuffix("s")
        if name not in ITEMS or name in share:
            raise ValueError(f"name each of {', '.join(ITEMS)} once")
        place = ITEMS.index(name)
        if len(number) > 1 or int(number) > counts[place]:
            raise ValueError(f"there are {_named(counts[place], place)}")
        share[name] = int(number)
    return Move(share=tuple(share.get(name, 0) for name in ITEMS))


def _named(number: int, place: int) -> str:
    return f"{number} {ITEMS[place]}{'' if number == 1 else 's'}"


def _listed(share: Share) -> str:
    """Return a share in words: `2 books 1 hat`."""
    named = [_named(number, place) for place, number in enumerate(share) if number]
    return " ".join(named) or _named(0, 0)


class Negotiation(TwoPlayerGame):
    """Divide books, hats and balls with another player by talking, when neither knows what they are worth to the other.

    ## Description
    The two seats speak in turn. An answer proposes a division, accepts the other's latest proposal, or is a message in
    words, which the other seat reads. All items are worth 10 to each seat, each kind differently.

    ## Action Space
    `Text(max_action_length)`: `propose 2 books 1 hat` (what the speaker gets), `accept`, or any message that begins
    with another word.

    ## Observation Space
    `Text`: at first the items and what one of each is worth to the seat, then what the other seat has said or offers,
    and how many turns the seat has, such as `2 books worth 1, 1 hat worth 8, 3 balls worth 0`, `offers you 1 hat`,
    `4 turns left`, each in a line.

    ## Starting State
    See `drawn_problem`. A fifth of the problems, by a hash, are those of validation (the option `held_out`).

    ## Rewards
    What a seat's items are worth to it, as a fraction of 10, at an agreement; 0 to both without one. They do not sum to
    0.

    ## Trivial Policies
    Accepting the first offer has a return at most 0.35 of the greedy player and 0.70 of the fair one, who leaves all
    that it does not need for half.

    ## Episode End
    Terminated by an acceptance, or after `turns` turns of each seat.

    ## Information
    `success`: the seat that moved has items worth half or more of all. `metrics`, at the end of a game: `agreement`,
    and of an agreement `joint_value`, the sum of both rewards, and `pareto_efficient`. `action_is_valid`: the answer
    was no malformed proposal, and no acceptance without one. With two seats, `seat_rewards` and `seat_success` of each.

    ## Arguments
    `turns`: of each seat. `max_action_length`: in characters. `opponent` in training and `validation_opponent` in
    validation, None for two seats: `random`; `fair`, who accepts what is worth half to it, and asks for the least that
    is; `greedy`, who wants everything of value at first, and comes down to half until its last turn. They do not listen
    to words. The option `seat` of a reset is the player's beside an opponent.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    seat_names = ("first", "second")
    frequent_words = (
        _PROPOSE, _ACCEPT, "offers you", "says", "worth", "turns left", "turn left", "I want the", "I do not need the",
        "no offer", "offer", *ITEMS, *(f"{item}s" for item in ITEMS), "agreed", "you get",
    )  # fmt: skip
    reward_range = (0.0, 1.0)

    @checked_arguments
    def __init__(
        self,
        *,
        turns: Count = 4,
        max_action_length: Count = 120,
        opponent: str | None = None,
        validation_opponent: str | None = "greedy",
        render_mode: str | None = None,
    ) -> None:
        super().__init__(
            opponent=opponent, validation_opponent=validation_opponent, render_mode=render_mode
        )
        self.turns = turns
        self.instructions = (
            "You and another player divide books, hats and balls. You see how many there are and what one of each is "
            f"worth to you; all together are worth {WORTH}. To the other player they are worth {WORTH} too, but each "
            f"kind may have another value, which you do not see. Answer {_PROPOSE} and the items you want, such as "
            f"{_PROPOSE} {_listed((2, 1, 0))}: the other player gets the rest. Answer {_ACCEPT} to agree to the other "
            f"player's latest proposal. Any other answer is a message to the other player. You have {turns} turns. "
            "Without an agreement both get nothing."
        )
        self.action_space = spaces.Text(max_action_length)
        self.observation_space = spaces.Text(max_action_length + 200, charset=PRINTABLE)
        self._start(Problem(counts=(2, 1, 3), values=((1, 8, 0), (2, 3, 1))))

    @property
    def players(self) -> Mapping[str, ScriptedPlayer]:
        """The scripted players by name."""
        return {
            "random": self.random_action,
            "fair": self.fair_action,
            "greedy": self.greedy_action,
        }

    def observe(self, seat: int) -> Observation:
        """Return the news of a seat, and the number of its turns that are left."""
        other, lines = 1 - seat, []
        if not self.spoken[seat]:
            of_kinds = zip(self.problem.counts, self.problem.values[seat], strict=True)
            lines.append(
                ", ".join(
                    f"{_named(count, place)} worth {value}"
                    for place, (count, value) in enumerate(of_kinds)
                )
            )
        if self.rewards is not None:
            agreed = f"agreed, you get {_listed(self.shares[seat])}" if self.shares else "no deal"
            return "\n".join([*lines, agreed])
        if self.words[other]:
            lines.append(f"says {self.words[other]}")
        if (offered := self.offered(seat)) is not None:
            lines.append(f"offers you {_listed(offered)}")
        if self.refusal and seat == self.mover:
            lines.append(f"not allowed: {self.refusal}")
        left = self.turns - self.spoken[seat]
        return "\n".join([*lines, f"{left} turn{'' if left == 1 else 's'} left"])

    def offered(self, seat: int) -> Share | None:
        """Return the share of a seat by the latest proposal; None where that is its own, or there is none."""
        if self.proposal is None or self.proposal[0] == seat:
            return None
        return self.problem.rest(self.proposal[1])

    def state_key(self) -> str:
        """Return the whole state: a seat's observation has only what is new to it."""
        own = "" if self.opponent is None else f" {self.seat_names[self.seat]}"
        state = (self.problem, self.mover, self.spoken, self.proposal, self.words, self.rewards)
        return f"{state}{own}"

    def describe(self) -> str:
        """Return the value of the offer to the seat that is to move: `offer 4`, or `no offer`."""
        offered = self.offered(self.mover)
        return "no offer" if offered is None else f"offer {self.problem.worth(self.mover, offered)}"

    def difficulty(self) -> int:
        """Return what the seats lack together, of all for both, in the best division."""
        return SEATS * WORTH - max(map(sum, self.problem.outcomes()))

    def random_action(self, rng: np.random.Generator) -> str:
        """Return a random proposal or message, or accept where that is possible, each as likely."""
        offered = self.offered(self.mover) is not None
        kind = int(rng.integers(3 if offered else 2))
        if kind == 0:
            shares = self.problem.shares()
            return f"{_PROPOSE} {_listed(shares[int(rng.integers(len(shares)))])}"
        if kind == 1:
            said = ("I want the", "I do not need the")[int(rng.integers(2))]
            return f"{said} {ITEMS[int(rng.integers(len(ITEMS)))]}s"
        return _ACCEPT

    def fair_action(self, rng: np.random.Generator) -> str:
        """Accept what is worth half, or ask for the least that is."""
        return self._conceded(WORTH / 2, rng)

    def greedy_action(self, rng: np.random.Generator) -> str:
        """Do so with an aspiration that falls linearly from all to half until the last turn.

        A time-dependent tactic (Faratin, Sierra and Jennings, 1998, section 4.1.1, with the exponent 1).
        """
        done = self.spoken[self.mover] / max(self.turns - 1, 1)
        return self._conceded(WORTH * (1 - done / 2), rng)

    def _conceded(self, aspiration: float, rng: np.random.Generator) -> str:
        """Accept what is worth the aspiration, or propose the least that is, of these shares one with fewest items."""
        problem, seat = self.problem, self.mover
        offered = self.offered(seat)
        if offered is not None and problem.worth(seat, offered) >= aspiration:
            return _ACCEPT
        enough = [share for share in problem.shares() if problem.worth(seat, share) >= aspiration]
        ranks = {share: (problem.worth(seat, share), sum(share)) for share in enough}
        least = [share for share in enough if ranks[share] == min(ranks.values())]
        return f"{_PROPOSE} {_listed(least[int(rng.integers(len(least)))])}"

    def _deal(self) -> None:
        self._start(drawn_problem(self.np_random, held_out=self.held_out))

    def _start(self, problem: Problem) -> None:
        self.problem, self.mover = problem, 0
        self.spoken, self.words, self.refusal = [0, 0], ["", ""], ""
        self.proposal: tuple[int, Share] | None = None
        """Latest proposal: who made it, and what that seat would get."""
        self.shares: tuple[Share, Share] | None = None
        """What each seat gets by an agreement."""

    def _play(self, action: str) -> bool:
        seat, other = self.mover, 1 - self.mover
        try:
            move = read_move(action.encode(errors="replace").decode(), self.problem.counts)
            if move.accepts and self.offered(seat) is None:
                raise ValueError("there is no proposal to accept")
        except ValueError as error:
            self.refusal = str(error)
            return False
        self.refusal = ""
        self.spoken[seat] += 1
        self.words[seat] = move.words
        if move.accepts:
            self._agree()
            return True
        if move.share is not None:
            self.proposal = (seat, move.share)
        if self.spoken[other] == self.turns:
            self.rewards = (0.0, 0.0)
        else:
            self.mover = other
        return True

    def _agree(self) -> None:
        assert self.proposal is not None
        proposer, share = self.proposal
        rest = self.problem.rest(share)
        self.shares = (share, rest) if proposer == 0 else (rest, share)
        first, second = (self.problem.worth(seat, self.shares[seat]) for seat in range(SEATS))
        self.rewards = (first / WORTH, second / WORTH)

    def _forfeited(self, loser: int) -> tuple[float, float]:
        """Return the rewards without an agreement."""
        return (0.0, 0.0)

    def _solved(self, reward: float) -> bool:
        """Return whether a reward is a proportional share, half of the value of all items (Steinhaus, 1948)."""
        return 2 * reward >= 1

    def _metrics(self) -> dict[str, float]:
        metrics = {"agreement": float(self.shares is not None)}
        if self.shares is not None and self.rewards is not None:
            values = [self.problem.worth(seat, self.shares[seat]) for seat in range(SEATS)]
            metrics["joint_value"] = sum(self.rewards)
            metrics["pareto_efficient"] = float((values[0], values[1]) in self.problem.frontier())
        return metrics
