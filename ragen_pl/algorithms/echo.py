"""Loss on the text of the environment that follows a response (ECHO; Shrivastava et al., 2026, arXiv 2605.24517)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ragen_pl.trajectory import Role


def following_text(role: Tensor, text: Tensor, episode: Tensor) -> Tensor:
    """Mark text that follows a response, each token once an episode: in the first row in which it does.

    What comes before the first response is the task, and is not predicted from an action. Neither are tokens of the
    chat template and of images.

    Args:
        role: int8 `[rows, time]`, a `Role`.
        text: int64 `[rows, time]`, number of a token in its episode's text, the same wherever it is shown.
        episode: int64 `[rows]`.

    Returns:
        bool `[rows, time]`.

    >>> role = torch.tensor([[1, 0, 4, 1, 0, -1], [6, 1, 0, 4, 2, 0]], dtype=torch.int8)
    >>> following_text(role, torch.tensor([[0, 1, 2, 3, 4, -1], [1, 3, 4, 5, 6, 7]]), torch.tensor([0, 0])).int()
    tensor([[0, 0, 0, 1, 0, 0],
            [0, 0, 0, 0, 1, 0]], dtype=torch.int32)
    """
    responds = (role == Role.SAMPLED) | (role == Role.EARLIER)
    is_text = (role == Role.OBSERVATION) | (role == Role.RESULT) | (role == Role.SYSTEM)
    follows = is_text & (responds.cumsum(1) > 0)
    rows, columns = follows.nonzero(as_tuple=True)
    names = torch.stack([episode[rows], text[rows, columns]], dim=1)
    number = torch.unique(names, dim=0, return_inverse=True)[1]
    first = rows.new_full((int(number.max()) + 1 if len(number) else 0,), len(role))
    first = first.scatter_reduce(0, number, rows, "amin")
    follows[rows, columns] = first[number] == rows
    return follows


def role_weights(role: Tensor, marked: Tensor, weights: Mapping[int, float]) -> Tensor:
    """Return the weight of each marked token by its role, float32 of the shape of `role`, 0 elsewhere.

    Args:
        role: int8, any shape.
        marked: Bool, same shape.
        weights: Weight by role; 0 for one that is missing.
    """
    result = torch.zeros(role.shape, device=role.device)
    for number, weight in weights.items():
        result = torch.where(marked & (role == number), weight, result)
    return result


def text_loss(logprobs: Tensor, weight: Tensor, *, tokens: float | Tensor) -> Tensor:
    """Return the sum of weight times negative log-prob over the number of tokens with a weight, `[]`; 0 without any.

    Args:
        logprobs: `[rows, time]`.
        weight: `[rows, time]`.
        tokens: Number of tokens with a weight in the whole optimizer step, apart from the policy's own denominator.
    """
    inside = torch.where(weight > 0, logprobs.float(), 0.0)
    count = torch.as_tensor(tokens, dtype=inside.dtype, device=inside.device)
    return -(weight * inside).sum() / count.clamp(min=1)
