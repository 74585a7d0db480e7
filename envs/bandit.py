"""Two-armed bandit whose arm names suggest risk. An episode is one choice in one turn.

After the Bandit task of RAGEN (Wang et al. 2025, "RAGEN: Understanding Self-Evolution in LLM
Agents via Multi-Turn Reinforcement Learning"), with this project's own lists of names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import numpy as np
from gymnasium import spaces

from .base import TEXT_CHARSET, Environment, Observation, Probability, Reward, checked_arguments


class BanditNames(StrEnum):
    """Set of name pairs that the arms are drawn from."""

    TRAIN = "train"
    HELD_OUT = "held_out"
    MISLEADING = "misleading"


# (bold name, calm name)
_TRAIN = (
    ("Dragon", "Phoenix"),
    ("Gambler", "Librarian"),
    ("Pirate", "Gardener"),
    ("Volcano", "Meadow"),
    ("Tiger", "Turtle"),
    ("Storm", "Harbor"),
    ("Rocket", "Bicycle"),
    ("Explorer", "Clerk"),
)
_HELD_OUT = (
    ("Trader", "Teacher"),
    ("Shark", "Snail"),
    ("Lightning", "Candle"),
    ("Daredevil", "Accountant"),
)

NAME_PAIRS: dict[BanditNames, tuple[tuple[str, str], ...]] = {
    BanditNames.TRAIN: _TRAIN,
    BanditNames.HELD_OUT: _HELD_OUT,
    # The risky arm has the calm name.
    BanditNames.MISLEADING: tuple((calm, bold) for bold, calm in _HELD_OUT),
}
"""Pairs (name of the risky arm, name of the safe arm) by set of names."""


class Bandit(Environment):
    """Pull one of two arms whose names suggest risk and reward.

    ## Description
    One arm always pays `safe_reward`. The other pays `risky_reward` with probability
    `risky_probability` and 0 otherwise. The risky arm has a bold name and the safe arm a calm name;
    with `names="misleading"` it is the reverse.

    ## Action Space
    `Discrete(2)`: the arms in the order of the observation. `action_names` are the names of the episode.

    ## Observation Space
    `Text`: `arms Dragon Phoenix`; after the pull `pulled Dragon paid 1`.

    ## Starting State
    A random pair of names in random order.

    ## Rewards
    The payoff of the arm.

    ## Episode End
    Terminated after one pull.

    ## Information
    `success`: the pulled arm has the higher expected payoff, whatever its actual payoff.
    `action_is_effective`: always true.

    ## Arguments
    - `names`: "train", "held_out" or "misleading".
    - `safe_reward`, `risky_reward`: at least 0. `risky_probability`: from 0 to 1.
      The two expected payoffs must differ.

    ## Trivial Policies
    Who always pulls the first arm has success at most 0.6: it is the better one half of the time.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    instructions = (
        "There are two arms and you pull one of them, once. One arm is safe: it always pays the "
        "same small amount. The other is risky: it pays a large amount now and then, and nothing "
        "otherwise. The names of the arms hint at which is which. Choose the arm that pays more "
        "on average; answer with its name."
    )

    @checked_arguments
    def __init__(
        self,
        *,
        names: BanditNames = BanditNames.TRAIN,
        safe_reward: Reward = 0.15,
        risky_reward: Reward = 1.0,
        risky_probability: Probability = 0.25,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if math.isclose(risky_reward * risky_probability, safe_reward):
            raise ValueError(
                f"safe_reward: found {safe_reward}, the mean payoff of the risky arm, expected another "
                "amount: no arm is better; set another safe_reward"
            )
        self.names = names
        self.safe_reward, self.risky_reward = safe_reward, risky_reward
        self.risky_probability = risky_probability
        self.risky_is_better = risky_reward * risky_probability > safe_reward
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Text(max_length=80, charset=TEXT_CHARSET)
        self._observation = ""
        self._arms(NAME_PAIRS[self.names][0], risky=0)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a pair of names and the order of the arms."""
        self._begin(seed=seed, options=options)
        pairs = NAME_PAIRS[self.names]
        pair, risky = divmod(int(self.np_random.integers(2 * len(pairs))), 2)
        self._arms(pairs[pair], risky=risky)
        return self._observation, {}

    def step(self, action: int | np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Pull an arm."""
        arm = self._take(action)
        self._over = True
        risky = arm == self.risky_arm
        paid = self.safe_reward
        if risky:
            paid = self.risky_reward * (self.np_random.random() < self.risky_probability)
        self._observation = f"pulled {self.action_names[arm]} paid {paid:g}"
        info = {"success": risky == self.risky_is_better, "action_is_effective": True}
        return self._observation, float(paid), True, False, info

    def state_key(self) -> str:
        """Return the arms in order, the risky arm and the last observation."""
        return f"{' '.join(self.action_names)} {self.risky_arm} {self._observation}"

    def describe(self) -> str:
        """Return the names of the arms: `first Dragon second Phoenix`."""
        first, second = self.action_names
        return f"first {first} second {second}"

    def difficulty(self) -> int:
        """Return 1, the number of pulls."""
        return 1

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return the arm with the higher expected payoff."""
        return self.risky_arm if self.risky_is_better else 1 - self.risky_arm

    def render(self) -> str:
        """Return the last observation (`render_mode="ansi"`)."""
        return self._observation

    def _arms(self, pair: tuple[str, str], *, risky: int) -> None:
        bold, calm = pair
        self.risky_arm = risky
        self.action_names = (bold, calm) if risky == 0 else (calm, bold)
        self._observation = f"arms {' '.join(self.action_names)}"
