"""PotentialShaping: a reward for getting nearer to the goal that changes no optimal policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Fraction, Positive
from ragen_pl.base.run_facts import RunFacts
from ragen_pl.rewards.shaping import Gather
from ragen_pl.trajectory import EpisodeStatus, Trajectory

_KEY = "algorithm.rewards.shaping"


def shaping_terms(
    potentials: Sequence[float], final: float, *, discounts: Sequence[float]
) -> list[float]:
    """Return the term F_k = gamma_k Phi(s_{k+1}) - Phi(s_k) of each turn (Ng, Harada and Russell, 1999, theorem 1).

    The shaped return-to-go is G_k - Phi(s_k), plus the discounted `final` where that is not 0.

    Args:
        potentials: Phi of the state that each turn starts in.
        final: Phi of the state after the last turn. It has to be 0 where the task ends, also by a turn limit, or
            the optimal policy may change (Grzes, 2017).
        discounts: gamma_k of each turn.

    >>> shaping_terms([-2.0, -1.0], 0.0, discounts=[1.0, 1.0])
    [1.0, 1.0]
    """
    after = [*potentials[1:], final]
    return [
        discount * later - earlier
        for discount, later, earlier in zip(discounts, after, potentials, strict=True)
    ]


@checked
@dataclass(frozen=True, kw_only=True)
class PotentialShaping:
    """Add F_k = gamma Phi(s_{k+1}) - Phi(s_k) to each turn: term `shaping`; see `shaping_terms`.

    Phi is `scale` times the environment's `potential()`, 0 once the task has ended. After a truncation, whose last
    state the critic values, it is that state's. The term is added after all others, where `RewardPlacement` moves none
    of it.

    Attributes:
        scale: Factor of the potential.
        gamma: Discount per turn, that of the estimator.
    """

    needs_trust = ()

    scale: Positive = 0.1
    gamma: Fraction = 1.0

    def check_run(self, facts: RunFacts) -> None:
        """Check that the environment has a potential, and that the estimator's returns have the same discount."""
        if "potential" not in facts.environment_members:
            raise ValueError(
                f"{_KEY}: {facts.environment} has no potential(); give it one, or set {_KEY}=null"
            )
        if facts.turn_discount is None:
            raise ValueError(
                f"{_KEY}: {facts.estimator} reads returns of whole episodes, which shaping changes by a constant of "
                "their initial state, or discounts tokens, under which it would change the task; set an algorithm of "
                f"returns-to-go by turns, such as turn_ppo, or {_KEY}=null"
            )
        if facts.turn_discount != self.gamma:
            raise ValueError(
                f"{_KEY}.gamma={self.gamma}: {facts.estimator} discounts a turn by {facts.turn_discount}, and with "
                "another discount shaping would change the task; set it to the same"
            )
        if facts.rewards_normalized:
            raise ValueError(
                f"algorithm.normalize: changes returns that {_KEY} has shaped, whose sum has another mean and spread; "
                f"set algorithm.normalize.by._target_=ragen_pl.algorithms.normalization.Raw, or {_KEY}=null"
            )

    def __call__(self, trajectories: Sequence[Trajectory], *, gather: Gather) -> None:
        """Add the term to each turn of the episodes that did not fail.

        Raises:
            ValueError: The potential of a state is not known.
        """
        for one in trajectories:
            if one.turns and one.status is not EpisodeStatus.FAILED:
                ends = one.status is not EpisodeStatus.TRUNCATED
                known = [turn.potential for turn in one.turns]
                final = 0.0 if ends else one.final_potential
                potentials = [self.scale * value for value in [*known, final] if value is not None]
                if len(potentials) <= len(one.turns):
                    raise ValueError(
                        f"{_KEY}: a state of group {one.group}, member {one.member} has no potential: potential() "
                        f"returned None, or the reward function has another key than {_KEY}"
                    )
                discounts = [self.gamma if turn.is_task_step else 1.0 for turn in one.turns]
                terms = shaping_terms(potentials[:-1], potentials[-1], discounts=discounts)
                for turn, term in zip(one.turns, terms, strict=True):
                    turn.reward_terms["shaping"] = term
