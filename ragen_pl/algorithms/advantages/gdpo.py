"""Reward terms that are standardized in their group one by one before they are added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from ragen_pl.algorithms.advantages.group import grpo
from ragen_pl.algorithms.advantages.reinforce import batch
from ragen_pl.algorithms.credit import (
    AdvantageInputs,
    Advantages,
    Estimator,
    StandardizationScope,
    broadcast,
)
from ragen_pl.algorithms.equality import EQUAL
from ragen_pl.algorithms.whitening import AllReduce, whiten
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Open

OF_SOME_TURNS = (
    "environment",
    "format",
    "overlong",
    "action_efficiency",
    "judge",
    "state_estimation",
    "transition_prediction",
)
"""Terms that the package sets in some turns only: an iteration may have none, such as one of malformed responses."""


class Final(StrEnum):
    """Last step: standardize over the episodes of the batch, over their trained tokens, or not at all.

    `tokens` weighs an episode by its number of tokens.
    """

    EPISODES = "episodes"
    TOKENS = "tokens"
    NONE = "none"


def gdpo(
    terms: Tensor,
    weights: Sequence[float],
    group: Tensor,
    *,
    final: Final = Final.EPISODES,
    tokens: Tensor | None = None,
    eps: float = 1e-6,
    all_reduce: AllReduce | None = None,
) -> Tensor:
    """Standardize each reward term in its group, add them up, and standardize the sums (GDPO; Liu et al., 2026).

    `S = sum_n w_n (R_n - mean_g) / (std_g + eps)` and `A = (S - mean) / (std + eps)` over the batch, with unbiased
    deviations (arXiv 2601.05242, eqs. 4 to 6). A term of large scale does not drown the others, and a term that is
    constant in a group adds 0. Sums that cancel but for rounding (`algorithms.equality`) are 0: equal weights do not
    rescue a group whose terms have a constant sum.

    Args:
        terms: `[terms, trajectories]`, sum of each term over an episode; computed in float64.
        weights: Weight of each term.
        group: Int `[trajectories]`; groups must be complete.
        final: What the sums are standardized over.
        tokens: int64 `[trajectories]`, trained tokens, for `Final.TOKENS`.
        eps: Added to the deviations; with `Final.TOKENS` 1e-8 is added to the variance of the sums instead.
        all_reduce: Sums a tensor over the ranks; None on one rank.

    Returns:
        float32 `[trajectories]`; 0 in a group of one, before the last step.

    Raises:
        ValueError: `Final.TOKENS` without `tokens`.

    >>> terms = torch.tensor([[1.0, 0.0], [100.0, 80.0]])
    >>> gdpo(terms, [1.0, 2.0], torch.tensor([0, 0]), final=Final.NONE)
    tensor([ 2.1213, -2.1213])
    """
    parts = torch.stack(
        [
            # in float32 the rounding of terms with a small deviation would not cancel
            weight * grpo(term.double(), group, eps=eps)
            for term, weight in zip(terms, weights, strict=True)
        ]
    )
    sums = parts.sum(0)
    sums = torch.where(sums.abs() <= EQUAL * parts.abs().sum(0), 0.0, sums).float()
    if final is Final.EPISODES:
        return batch(sums, eps=eps, all_reduce=all_reduce)
    if final is Final.NONE:
        return sums
    if tokens is None:
        raise ValueError(
            "final=tokens: found no number of tokens, expected one for each trajectory"
        )
    longest = int(tokens.max()) if len(tokens) else 0
    mask = torch.arange(max(1, longest), device=sums.device) < tokens[:, None]
    return whiten(sums[:, None].expand(mask.shape), mask, all_reduce=all_reduce)[:, 0]


@checked
@dataclass(frozen=True, kw_only=True)
class Decoupled(Estimator):
    """Reward terms standardized in their group one by one (GDPO). Terms without a weight are not read.

    Attributes:
        weights: Weight of each reward term. A name stands for its parts too: `environment` for `environment/<part>`.
        final: What the sums of the terms are standardized over.

    Raises:
        ValueError: There is no weight, or a term has two.
    """

    needs_trust = ()

    needs_groups: ClassVar[bool] = True
    reads_returns: ClassVar[bool] = False
    weights: Annotated[Mapping[str, float], Open()] = field(
        default_factory=lambda: {"environment": 1.0, "format": 1.0}
    )
    final: Final = Final.EPISODES

    def __post_init__(self) -> None:
        if not self.weights:
            raise ValueError("algorithm.estimator.weights={}: expected at least one reward term")
        for name in self.weights:
            whole = next(
                (other for other in self.weights if _covers(other, name) and other != name), None
            )
            if whole is not None:
                raise ValueError(
                    f"algorithm.estimator.weights: {name} is a part of {whole} and would count twice; leave out one"
                )

    @property
    def standardizes(self) -> StandardizationScope | None:
        """The group, by the deviation of each term."""
        return "group"

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `gdpo` to the terms.

        Raises:
            ValueError: No episode has a term, and it is not in `OF_SOME_TURNS`.
        """
        present = [
            [term for other, term in (inputs.terms or {}).items() if _covers(name, other)]
            for name in self.weights
        ]
        self._check_present(present, inputs, all_reduce)
        zero = torch.zeros_like(inputs.returns, dtype=torch.float64)
        sums = torch.stack([sum(own, start=zero) for own in present])
        advantages = gdpo(
            sums,
            [*self.weights.values()],
            inputs.group,
            final=self.final,
            tokens=inputs.loss_mask.sum(1),
            all_reduce=all_reduce,
        )
        return broadcast(advantages, inputs)

    def _check_present(
        self,
        present: Sequence[Sequence[Tensor]],
        inputs: AdvantageInputs,
        all_reduce: AllReduce | None,
    ) -> None:
        """Check that some episode has each term, but for those of few turns."""
        counts = torch.tensor(
            [*map(len, present)], dtype=torch.float32, device=inputs.returns.device
        )
        counts = counts if all_reduce is None else all_reduce(counts)
        has = dict(zip(self.weights, counts.tolist(), strict=True))
        absent = [name for name, count in has.items() if not count and name not in OF_SOME_TURNS]
        if absent:
            raise ValueError(
                f"algorithm.estimator.weights: no episode has a reward term {', '.join(absent)}; name those "
                "of the run's records (reward_terms); a reward function that adds its term to few turns sets 0.0 "
                "in the others"
            )


def _covers(name: str, term: str) -> bool:
    """Return whether a name stands for a reward term: its own, or a part of it."""
    return term == name or term.startswith(f"{name}/")
