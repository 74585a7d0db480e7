"""GSPO and CISPO by hand."""

from __future__ import annotations

import pytest
import torch

from ragen_pl.algorithms.policy_loss import clipped_surrogate
from ragen_pl.algorithms.ratio_losses import cispo, sequence_surrogate

TURN = torch.tensor([[0, 0, -1, 1, 1, 1]])
MASK = TURN >= 0


def test_sequence_surrogate_has_one_ratio_for_a_response() -> None:
    """Each response's ratio is the geometric mean; its gradient is A s (1 / n) a token under a mean."""
    logprobs = torch.tensor([[0.1, 0.3, 7.0, 0.0, 0.0, 0.6]], requires_grad=True)
    loss = sequence_surrogate(
        logprobs, torch.zeros(1, 6), torch.ones(1, 6), MASK, TURN, clip_low=0.5, clip_high=0.5
    )
    ratios = torch.tensor([[0.2, 0.2, 0.0, 0.2, 0.2, 0.2]]).exp() * MASK
    torch.testing.assert_close(loss.losses, -ratios)
    loss.losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, -ratios)
    held = sequence_surrogate(
        logprobs.detach(), torch.zeros(1, 6), torch.ones(1, 6), MASK, TURN, clip_low=0.1, clip_high=0.1
    )  # fmt: skip
    assert int(held.clipped_high) == 5 and held.losses[0, 0] == pytest.approx(-1.1)


def test_cispo_gives_every_token_a_gradient() -> None:
    logprobs = torch.tensor([[1.0, 0.2, 0.0, -3.0, 0.0, 0.0]], requires_grad=True)
    loss = cispo(logprobs, torch.zeros(1, 6), torch.ones(1, 6), MASK, clip_low=0.5, clip_high=0.5)
    loss.losses.sum().backward()
    expected = -torch.tensor([[1.5, 0.2, 0.0, 0.5, 1.0, 1.0]])
    expected[0, 1] = -torch.tensor(0.2).exp()
    torch.testing.assert_close(logprobs.grad, expected * MASK)
    ppo = clipped_surrogate(
        logprobs, torch.zeros(1, 6), torch.ones(1, 6), MASK, clip_low=0.5, clip_high=0.5
    )
    [gradient] = torch.autograd.grad(ppo.losses.sum(), logprobs)
    assert gradient[0, 0] == 0 and logprobs.grad[0, 0] != 0
