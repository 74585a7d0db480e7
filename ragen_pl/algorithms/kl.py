"""Distance of the policy from a reference: estimates from sampled tokens, and the full sum."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from ragen_pl.algorithms.equality import EQUAL
from ragen_pl.algorithms.whitening import AllReduce
from ragen_pl.base.checked import checked
from ragen_pl.base.constraints import Fraction


class KLEstimator(StrEnum):
    """Measures of the divergence; k1 to k3 estimate KL(policy || reference) (Schulman, 2020).

    - `k1`: log p - log p_ref; unbiased, may be negative.
    - `k2`: half its square; biased, low variance.
    - `k3`: rho - 1 - log rho with rho = p_ref / p; unbiased and never negative.
    - `abs`: `|log p - log p_ref|`.
    - `full`: KL(reference || policy) summed over the vocabulary, see `full_kl`.
    - `full_reverse`: KL(policy || reference) summed over the vocabulary.
    """

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    ABS = "abs"
    FULL = "full"
    FULL_REVERSE = "full_reverse"

    @property
    def over_vocabulary(self) -> bool:
        """Whether the divergence is summed over the vocabulary, not estimated from sampled tokens."""
        return self in (KLEstimator.FULL, KLEstimator.FULL_REVERSE)

    @property
    def from_tokens(self) -> KLEstimator:
        """The estimator of single tokens whose gradient in the loss is that of this divergence on average."""
        estimates = {KLEstimator.FULL: KLEstimator.K3, KLEstimator.FULL_REVERSE: KLEstimator.K2}
        return estimates.get(self, self)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, how: KLEstimator) -> Tensor:
    """Estimate the divergence token by token.

    k3 bounds the log ratio to ±20 and the result to ±10, as the public implementations do.

    Args:
        logprobs: Log-probs of the sampled tokens under the policy, any shape.
        ref_logprobs: Log-probs under the reference, same shape.
        how: An estimator of single tokens, neither `full` nor `full_reverse`.

    Returns:
        float32, same shape.

    >>> import torch
    >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-3.0]), how=KLEstimator.K2)
    tensor([2.])
    """
    difference = logprobs.float() - ref_logprobs.float()
    match KLEstimator(how):
        case KLEstimator.K1:
            return difference
        case KLEstimator.K2:
            return 0.5 * difference.square()
        case KLEstimator.K3:
            log_ratio = (-difference).clamp(-20.0, 20.0)
            return (log_ratio.exp() - 1 - log_ratio).clamp(-10.0, 10.0)
        case KLEstimator.ABS:
            return difference.abs()
        case _:
            raise ValueError(
                f"found how={how!s}, expected an estimator of single tokens; use full_kl"
            )


def full_kl(ref_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Sum KL(reference || policy) over the whole vocabulary, `sum_v p_ref (log p_ref - log p)`.

    With the arguments exchanged it is KL(policy || reference), in value and in gradient.

    Args:
        ref_logprobs: `[..., vocabulary]`, normalized.
        logprobs: `[..., vocabulary]`, normalized.

    Returns:
        float32 `[...]`.

    >>> import torch
    >>> full_kl(torch.tensor([1.0, 0.0]).log(), torch.tensor([0.5, 0.5]).log())
    tensor(0.6931)
    """
    ref_logprobs, logprobs = ref_logprobs.float(), logprobs.float()
    probability = ref_logprobs.exp()
    # A term of probability 0 is 0, not 0 * inf, in value and in gradient.
    empty = probability == 0
    terms = probability * (ref_logprobs.masked_fill(empty, 0.0) - logprobs.masked_fill(empty, 0.0))
    return terms.sum(-1)


def divergence_weights(
    entropy: Tensor,
    turn_weight: Tensor,
    mask: Tensor,
    *,
    log_vocabulary: float,
    all_reduce: AllReduce | None = None,
) -> Tensor:
    """Weigh tokens by their turn and by the confidence of the reference, with a mean of 1 over the mask.

    `w_t = n u_t (1 - H_t / log V) / sum_s u_s (1 - H_s / log V)`, n the number of tokens in the mask. Weights of turns
    and of confidence are the idea of SAGE-OPD (2026, arXiv 2606.19659); this form, which keeps the scale of the loss,
    is ours.

    Args:
        entropy: Entropy H of the reference's distributions in nats, any shape.
        turn_weight: Weight u of each token's turn, same shape.
        mask: Bool, same shape.
        log_vocabulary: Entropy log V of an even distribution over the ids that can be sampled.
        all_reduce: Sums a tensor over the ranks; None on one rank.

    Returns:
        float32, same shape, 0 off the mask, and everywhere if no token of the mask has a weight.

    >>> entropy, even = torch.tensor([0.0, 1.0]), torch.ones(2)
    >>> divergence_weights(entropy, even, even.bool(), log_vocabulary=2.0)
    tensor([1.3333, 0.6667])
    """
    confidence = 1 - entropy.double() / log_vocabulary
    # of an even distribution it is a rounding error, which would be all the weight where no token has any
    confidence = torch.where(confidence > EQUAL, confidence, 0.0)
    raw = torch.where(mask.bool(), turn_weight * confidence, 0.0)
    sums = torch.stack([raw.sum(), mask.sum().double()])
    total, count = sums if all_reduce is None else all_reduce(sums)
    return (raw * torch.where(total > 0, count / total, 0.0)).float()


@checked
@dataclass(frozen=True, kw_only=True)
class DivergenceWeights:
    """Weights of the divergence at each token, see `divergence_weights`.

    Attributes:
        turn_decay: Weight of a turn's tokens, relative to those of the turn before it. A teacher is least reliable on
            late turns of an episode that has gone wrong.
        confidence: Weigh a token by how sure the reference is there.
    """

    needs_trust = ()

    turn_decay: Fraction = 1.0
    confidence: bool = True

    def __call__(
        self,
        entropy: Tensor,
        turn: Tensor,
        mask: Tensor,
        *,
        log_vocabulary: float,
        all_reduce: AllReduce | None = None,
    ) -> Tensor:
        """Apply `divergence_weights`.

        Args:
            entropy: Entropy of the reference's distribution at each token, `[tokens]`.
            turn: Index of the token's turn, int64 `[tokens]`.
            mask: Bool `[tokens]`.
            log_vocabulary: Largest entropy.
            all_reduce: Sums a tensor over the ranks; None on one rank.
        """
        turn_weight = torch.as_tensor(self.turn_decay, dtype=torch.float64) ** turn
        return divergence_weights(
            entropy if self.confidence else torch.zeros_like(entropy),
            turn_weight.to(entropy.device),
            mask,
            log_vocabulary=log_vocabulary,
            all_reduce=all_reduce,
        )
