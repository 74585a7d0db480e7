"""Bandit that requires memory, and the exact optimal returns with and without memory.

One arm pays throughout the episode. The observation shows the last payoff but not the arm that was pulled.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from gymnasium import spaces

from .base import TEXT_CHARSET, Environment, Observation, checked_arguments

ARM_NAMES = ("Red", "Blue", "Green", "Yellow", "White", "Black", "Pink", "Gray")
_MAX_ARMS = 8  # one for each name


class BanditMemory(Environment):
    """Find the arm that pays by remembering earlier pulls.

    ## Description
    One random arm pays 1 at every pull. The other arms pay 0. An observation shows the turn and the
    last payoff, but not the arm: only the agent's own earlier responses show it. The best memoryless
    policy (`memoryless_return`) earns less than the best policy with memory (`remembering_return`).

    ## Action Space
    `Discrete(arms)`: the arms, Red, Blue, Green, Yellow, White, Black, Pink, Gray.

    ## Observation Space
    `Text`: `turn 1 of 6 last none`, then `turn 2 of 6 last 0` or `turn 2 of 6 last 1`.

    ## Starting State
    The paying arm is uniform over the arms.

    ## Rewards
    1 for a pull of the paying arm, 0 otherwise.

    ## Episode End
    Terminated after `turns` pulls.

    ## Information
    `success`: the last pull of the episode paid; false before the last turn.
    `action_is_effective`: always true.

    ## Arguments
    - `arms`: 2 to 8. `turns`: pulls per episode, 3 to 20. With fewer turns memory has no value.

    ## Trivial Policies
    Who always pulls the same arm has success at most 0.4 and return at most 2.2 with the shipped settings.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    @checked_arguments
    def __init__(
        self,
        *,
        arms: Annotated[int, Interval(ge=2, le=_MAX_ARMS)] = 4,
        turns: Annotated[int, Interval(ge=3, le=20)] = 6,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.arms, self.turns = arms, turns
        self.action_names = ARM_NAMES[:arms]
        self.instructions = (
            f"There are {arms} arms: {', '.join(self.action_names)}. You pull one arm in each of "
            f"{turns} turns. One of them pays 1 at every pull and the others pay nothing; which "
            "one it is stays the same until the end. Each turn tells what your last pull paid, "
            "but not which arm you pulled: remember it. Collect as much as you can; answer with "
            "the name of an arm."
        )
        self.action_space = spaces.Discrete(arms)
        self.observation_space = spaces.Text(max_length=40, charset=TEXT_CHARSET)
        self.good_arm = 0
        self._pulls: list[tuple[int, int]] = []  # (arm, payoff)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw the paying arm."""
        self._begin(seed=seed, options=options)
        self.good_arm = int(self.np_random.integers(self.arms))
        self._pulls = []
        return self.render(), {}

    def step(self, action: int | np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Pull an arm."""
        arm = self._take(action)
        paid = int(arm == self.good_arm)
        self._pulls.append((arm, paid))
        self._over = len(self._pulls) == self.turns
        info = {"success": self._over and bool(paid), "action_is_effective": True}
        return self.render(), float(paid), self._over, False, info

    def state_key(self) -> str:
        """Return the paying arm, the number of pulls and the last payoff."""
        return f"{self.arms} {self.turns} {self.good_arm} {len(self._pulls)} {self._last()}"

    def describe(self) -> str:
        """Return the last payoff: `last 0`."""
        return f"last {self._last()}"

    def difficulty(self) -> int:
        """Return the number of arms that may still be the paying arm, given the pulls so far."""
        if any(paid for _, paid in self._pulls):
            return 1
        return self.arms - len({arm for arm, _ in self._pulls})

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return the arm that is known to pay, or an arm that has not been tried."""
        for arm, paid in self._pulls:
            if paid:
                return arm
        tried = {arm for arm, _ in self._pulls}
        return int(rng.choice([arm for arm in range(self.arms) if arm not in tried]))

    def render(self) -> str:
        """Return the current observation (`render_mode="ansi"`)."""
        turn = min(len(self._pulls) + 1, self.turns)
        return f"turn {turn} of {self.turns} last {self._last()}"

    def _last(self) -> str:
        return str(self._pulls[-1][1]) if self._pulls else "none"


def remembering_return(*, arms: int, turns: int) -> float:
    """Return the optimal expected return of an agent that remembers its pulls and their payoffs.

    The agent tries the arms one by one and stays with the paying arm. The n-th arm pays with probability
    1 / arms.

    >>> remembering_return(arms=4, turns=6)
    4.5
    """
    return sum(turns - tried for tried in range(min(arms, turns))) / arms


def memoryless_return(*, arms: int, turns: int) -> float:
    """Return the optimal expected return of an agent that sees only the current observation.

    Each observation (turn, last payoff) occurs at most once in an episode. The return is linear in the
    choice at each observation, and a deterministic policy is optimal. The future return depends only on
    the set of paying arms for which the last pull paid. Backward induction gives the value of these sets.

    >>> memoryless_return(arms=4, turns=6)
    2.75
    """
    # After a turn with actions `if_lost` and `if_paid`, only these two arms can have paid.
    sets = {frozenset(pair) for pair in product(range(arms), repeat=2)} | {frozenset[int]()}
    value = dict.fromkeys(sets, 0)
    for _ in range(turns - 1):
        value = {
            paid: max(
                len(after) + value[after]
                for if_lost, if_paid in product(range(arms), repeat=2)
                for after in [_paid_after(paid, if_lost=if_lost, if_paid=if_paid)]
            )
            for paid in sets
        }
    return (1 + value[frozenset({0})]) / arms


def _paid_after(paid: frozenset[int], *, if_lost: int, if_paid: int) -> frozenset[int]:
    lost_now_paid = {if_lost} - paid
    return frozenset(lost_now_paid | ({if_paid} & paid))
