"""Distance of the policy from a reference: estimates from sampled tokens, and the full sum."""

from __future__ import annotations

from enum import StrEnum

from torch import Tensor


class KLEstimator(StrEnum):
    """Measures of the divergence; k1 to k3 estimate KL(policy || reference) (Schulman, 2020).

    - `k1`: log p - log p_ref; unbiased, may be negative.
    - `k2`: half its square; biased, low variance.
    - `k3`: rho - 1 - log rho with rho = p_ref / p; unbiased and never negative.
    - `abs`: |log p - log p_ref|.
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
