"""The distribution that tokens are sampled from, computed alike in the engine and the trainer."""

from __future__ import annotations

import torch
from torch import Tensor

# finite: 0 · log 0 is then 0 and not NaN in entropies and divergences
BANNED = -1e30


def log_distribution(
    logits: Tensor, *, temperature: Tensor | float = 1.0, banned: Tensor | None = None
) -> Tensor:
    """Return float32 log-probabilities `[…, vocab]` after temperature and bans.

    Args:
        logits: `[…, vocab]` in any floating type; the computation is in float32.
        temperature: Sampling temperature; a tensor broadcasts against `logits`.
        banned: Ids that are never sampled, int64; None for none.

    Examples:
        >>> log_distribution(torch.tensor([0.0, 0.0, 5.0]), banned=torch.tensor([2])).exp()
        tensor([0.5000, 0.5000, 0.0000])
    """
    logits = logits.float()
    if not (isinstance(temperature, float) and temperature == 1.0):
        logits = logits / temperature
    if banned is not None and len(banned):
        logits = logits.index_fill(-1, banned, BANNED)
    return torch.log_softmax(logits, dim=-1)


def entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy in nats, `[…]`, of log-probabilities `[…, vocab]`."""
    return -(log_probs.exp() * log_probs).sum(-1)


def draw(log_probs: Tensor, uniforms: Tensor, *, greedy: Tensor) -> Tensor:
    """Sample one token for each row by inverting the cumulative distribution.

    Args:
        log_probs: float32 `[rows, vocab]`.
        uniforms: float64 `[rows]` in [0, 1).
        greedy: Rows that take the most probable token, bool `[rows]`.

    Returns:
        int64 `[rows]`.
    """
    if bool(greedy.all()):
        return log_probs.argmax(-1)
    cumulative = log_probs.exp().cumsum(-1, dtype=torch.float64)
    # 1 - u lies in (0, 1]: a token of probability 0 is never the first to reach it
    target = (1.0 - uniforms) * cumulative[:, -1]
    sampled = (
        torch.searchsorted(cumulative, target[:, None])
        .squeeze(-1)
        .clamp_(max=log_probs.shape[-1] - 1)
    )
    if not bool(greedy.any()):
        return sampled
    return torch.where(greedy, log_probs.argmax(-1), sampled)
