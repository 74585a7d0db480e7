"""From token losses to one number, divided by counts of the whole optimizer step.

A loss is a sum divided by a count over all microbatches, accumulated steps and ranks. So the gradient does
not depend on how a minibatch is split. Where a strategy averages gradients over ranks rather than summing
them (DDP), multiply the loss by the number of ranks.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor


class Aggregation(StrEnum):
    """Averages of token losses.

    A sequence is a row; `constant` is Dr. GRPO's sum / constant per sequence. An episode of several turns may be
    several rows: averages over sequences weigh it by their number, and `seq-mean-token-sum` changes its scale with it.
    `token-mean` and `episode-mean`, the mean over episodes of their token means, do not depend on that division.
    """

    TOKEN_MEAN = "token-mean"
    EPISODE_MEAN = "episode-mean"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    CONSTANT = "constant"

    @property
    def counts_rows(self) -> bool:
        """Whether the average depends on how episodes are divided into rows."""
        return self not in (Aggregation.TOKEN_MEAN, Aggregation.EPISODE_MEAN)


def aggregate(
    token_losses: Tensor,
    mask: Tensor,
    *,
    how: Aggregation,
    tokens: float | Tensor,
    sequences: float | Tensor,
    constant: float | None = None,
    episodes: float | Tensor = 0.0,
    episode_tokens: Tensor | None = None,
) -> Tensor:
    """Sum token losses inside the mask and divide by the count of the whole optimizer step.

    Args:
        token_losses: `[batch, time]`.
        mask: Bool `[batch, time]`, or a weight of each token.
        how: The kind of average.
        tokens: Sum of `mask` over the whole optimizer step.
        sequences: Number of sequences of the whole optimizer step.
        constant: Number of tokens that a sequence stands for, with `Aggregation.CONSTANT`.
        episodes: Number of episodes of the whole optimizer step, with `Aggregation.EPISODE_MEAN`; one that is partly
            in it counts by the fraction of its tokens.
        episode_tokens: `[batch]`, sum of `mask` over a row's whole episode, with `Aggregation.EPISODE_MEAN`.

    Returns:
        Scalar; 0 with a gradient of 0 where the mask is empty.

    Raises:
        ValueError: `Aggregation.EPISODE_MEAN` without `episode_tokens`.

    >>> losses, mask = torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[1, 1], [1, 0]]) > 0
    >>> aggregate(losses, mask, how=Aggregation.SEQ_MEAN_TOKEN_MEAN, tokens=3.0, sequences=2.0)
    tensor(3.5000)
    """
    how = Aggregation(how)
    inside = token_losses.masked_fill(~mask.bool(), 0.0) * mask
    count: float | Tensor = sequences
    if how is Aggregation.SEQ_MEAN_TOKEN_MEAN:
        inside = _divided(inside, mask.sum(dim=1))
    elif how is Aggregation.EPISODE_MEAN:
        if episode_tokens is None:
            raise ValueError("episode-mean: found no episode_tokens, expected one number a row")
        inside, count = _divided(inside, episode_tokens), episodes
    elif how is Aggregation.TOKEN_MEAN:
        count = tokens
    elif how is Aggregation.CONSTANT:
        count = sequences * (constant or 1.0)
    total = torch.as_tensor(count, dtype=inside.dtype, device=inside.device)
    # A batch without a token has nothing to divide: 0, and a gradient of 0 for every rank's step.
    return inside.sum() / torch.where(total > 0, total, 1.0)


def _divided(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows divided by their weights, those without one unchanged."""
    return rows / torch.where(weight > 0, weight, 1)[:, None]
