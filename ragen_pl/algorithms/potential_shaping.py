"""Potential-based shaping of rewards: it moves rewards to earlier turns and changes no optimal policy."""

from __future__ import annotations

from collections.abc import Sequence


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
