"""Advantages from a teacher's log-probs of the sampled tokens (on-policy distillation), and a control without one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ragen_pl.algorithms.credit import AdvantageInputs, Advantages, Estimator
from ragen_pl.algorithms.whitening import AllReduce
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Fraction
from ragen_pl.base.run_facts import RunFacts


def discounted(values: Tensor, mask: Tensor, *, discount: float) -> Tensor:
    """Add to each token's value the discounted sum of the next token of the mask, `A_t = a_t + discount A_next`.

    Args:
        values: `[rows, tokens]`.
        mask: Bool `[rows, tokens]`.
        discount: From one token of the mask to the next; 0 for the values themselves.

    Returns:
        `[rows, tokens]`, 0 off the mask.

    >>> discounted(torch.ones(1, 3), torch.tensor([[1, 0, 1]]), discount=0.5)
    tensor([[1.5000, 0.0000, 1.0000]])
    """
    mask, following = mask.bool(), values.new_zeros(len(values))
    sums = torch.zeros_like(values)
    for token in reversed(range(values.shape[1])):
        own = values[:, token] + discount * following
        sums[:, token] = torch.where(mask[:, token], own, 0.0)
        following = torch.where(mask[:, token], own, following)
    return sums


@checked
@dataclass(frozen=True, kw_only=True)
class TeacherRatio(Estimator):
    """`c (log q - log p_old)` of each sampled token, with q a teacher's and p_old the policy's before the update.

    It is what the KL penalty (k1) takes from the tokens' rewards, with the opposite sign and without the rewards
    (on-policy distillation, Lu et al., 2025; MiMo-V2-Flash, 2026, arXiv 2601.02780, eq. 8). The weight c is
    `algorithm.loss.kl.coefficient`, and `algorithm.loss.kl.bound` bounds the log ratio.

    Attributes:
        discount: Weight of the next trained token's advantage in a token's own; with 1 a token answers for the
            divergence of all that follow it in the episode.
    """

    needs_trust = ()

    reads_returns: ClassVar[bool] = False

    discount: Fraction = 0.0

    def check_run(self, facts: RunFacts) -> None:
        """Check that there is a penalty to read.

        Raises:
            ValueError: There is none.
        """
        if not facts.rewards_penalized:
            raise ValueError(
                "algorithm.estimator=TeacherRatio: reads the KL penalty on the rewards, and there is none; set "
                "algorithm.loss.kl.place=reward algorithm.loss.kl.estimator=k1"
            )
        super().check_run(replace(facts, rewards_penalized=False))

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Apply `discounted` to the penalties on the tokens of M_loss.

        Raises:
            ValueError: `inputs` has no penalty.
        """
        if inputs.penalty is None:
            raise ValueError(
                "TeacherRatio: found no KL penalty; set algorithm.loss.kl.place=reward and estimator=k1"
            )
        sums = discounted(-inputs.penalty, inputs.loss_mask, discount=self.discount)
        return Advantages(advantages=sums, returns=torch.zeros_like(sums))


@checked
@dataclass(frozen=True, kw_only=True)
class UnlikelyTokens(Estimator):
    """-1 for each sampled token that the policy had a low probability of, and 0 for all others.

    A control of distillation without a teacher and without rewards. A teacher gives most of the tokens that are
    unlikely to the policy a negative advantage, and a constant one is reported to do as well ("Does On-Policy
    Distillation Really Distill?", 2026, arXiv 2608.31046, by its abstract; the threshold is ours). Where it does, the
    policy has only become more certain.

    Attributes:
        below: Probability from which a token is likely.
    """

    needs_trust = ()

    reads_returns: ClassVar[bool] = False

    below: Fraction = 0.5

    def __call__(
        self, inputs: AdvantageInputs, *, all_reduce: AllReduce | None = None
    ) -> Advantages:
        """Compare the log-probs of the tokens of M_loss.

        Raises:
            ValueError: `inputs` has no log-probs.
        """
        if inputs.logprobs is None:
            raise ValueError("UnlikelyTokens: found logprobs=None, expected those of the tokens")
        limit = math.log(self.below) if self.below else -math.inf
        unlikely = inputs.loss_mask & (inputs.logprobs < limit)
        advantages = -unlikely.float()
        return Advantages(advantages=advantages, returns=torch.zeros_like(advantages))
