"""Entropy of a distribution given by its logits."""

from __future__ import annotations

from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Sum `-p log p` over the vocabulary, in float32 and in nats.

    Args:
        logits: `[..., vocabulary]`, already divided by the temperature; -inf forbids a token.

    Returns:
        float32 `[...]`.

    >>> import torch
    >>> entropy(torch.tensor([0.0, 0.0, -torch.inf]))
    tensor(0.6931)
    """
    logprobs = logits.float().log_softmax(-1)
    probabilities = logprobs.exp()
    # A forbidden token adds 0, not 0 * inf, in value and in gradient.
    return -(probabilities * logprobs.masked_fill(probabilities == 0, 0.0)).sum(-1)
