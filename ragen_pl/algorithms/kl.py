"""Distance of the policy from a reference: estimates from sampled tokens, and the full sum."""

from __future__ import annotations

from enum import StrEnum

from torch import Tensor


class KLEstimator(StrEnum):
    """Estimators of KL(policy || reference) from tokens the policy sampled (Schulman, 2020)."""

    K1 = "k1"  # log p - log p_ref: unbiased, may be negative
    K2 = "k2"  # half its square: biased, low variance
    K3 = "k3"  # rho - 1 - log rho with rho = p_ref / p: unbiased and never negative
    ABS = "abs"  # |log p - log p_ref|


class Direction(StrEnum):
    """Which distribution weighs the terms."""

    FORWARD = "forward"  # KL(reference || policy)
    REVERSE = "reverse"  # KL(policy || reference)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, how: KLEstimator) -> Tensor:
    """Estimate the divergence token by token.

    k3 bounds the log ratio to ±20 and the result to ±10, as the public implementations do.

    Args:
        logprobs: any shape, of the sampled tokens under the policy.
        ref_logprobs: same shape, under the reference.
        how: the estimator.

    Returns:
        float32, same shape.

    >>> import torch
    >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-3.0]), how=KLEstimator.K2)
    tensor([2.])
    """
    how = KLEstimator(how)
    difference = logprobs.float() - ref_logprobs.float()
    if how == KLEstimator.K1:
        return difference
    if how == KLEstimator.K2:
        return 0.5 * difference.square()
    if how == KLEstimator.ABS:
        return difference.abs()
    log_ratio = (-difference).clamp(-20.0, 20.0)
    return (log_ratio.exp() - 1 - log_ratio).clamp(-10.0, 10.0)


def full_kl(
    ref_logprobs: Tensor, logprobs: Tensor, *, direction: Direction = Direction.FORWARD
) -> Tensor:
    """Sum the divergence over the whole vocabulary.

    Forward, `sum_v p_ref (log p_ref - log p)`; reverse with the parts exchanged.

    Args:
        ref_logprobs: `[..., vocabulary]`, normalized.
        logprobs: `[..., vocabulary]`, normalized.
        direction: which distribution weighs the terms.

    Returns:
        float32 `[...]`.

    >>> import torch
    >>> full_kl(torch.tensor([1.0, 0.0]).log(), torch.tensor([0.5, 0.5]).log())
    tensor(0.6931)
    """
    ref_logprobs, logprobs = ref_logprobs.float(), logprobs.float()
    forward = Direction(direction) == Direction.FORWARD
    weight, other = (ref_logprobs, logprobs) if forward else (logprobs, ref_logprobs)
    probability = weight.exp()
    # A term of probability 0 is 0, not 0 * inf, in value and in gradient.
    empty = probability == 0
    terms = probability * (weight.masked_fill(empty, 0.0) - other.masked_fill(empty, 0.0))
    return terms.sum(-1)
