"""GSPO, CISPO and DPPO by hand."""

from __future__ import annotations

import pytest
import torch

from ragen_pl.algorithms.policy_loss import clipped_surrogate
from ragen_pl.algorithms.ratio_losses import (
    Divergence,
    DivergencePolicyLoss,
    Unit,
    binary_divergence,
    cispo,
    divergence_masked,
    sequence_surrogate,
)

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


def test_dppo_leaves_out_what_moves_further_than_a_divergence() -> None:
    """A rare token may change its ratio much; one that comes back is never left out."""
    new = torch.tensor([[0.04, 0.9, 0.0, 0.3, 0.3, 0.9]]).log().requires_grad_()
    old = torch.tensor([[0.01, 0.7, 0.0, 0.6, 0.6, 0.7]]).log()
    advantages = torch.tensor([[1.0, 1.0, 1.0, -2.0, 1.0, -1.0]])
    loss = divergence_masked(new, old, advantages, MASK, TURN, clip_low=0.2, clip_high=0.15)
    expected = torch.tensor([[-4.0, 0.0, 0.0, 0.0, -0.5, 9 / 7]])
    torch.testing.assert_close(loss.losses, expected)
    loss.losses.sum().backward()
    torch.testing.assert_close(new.grad, expected)
    assert (int(loss.clipped_high), int(loss.clipped_low), int(loss.tokens)) == (1, 1, 5)
    wide = divergence_masked(new, old, advantages, MASK, TURN, clip_low=0.31, clip_high=0.21)
    torch.testing.assert_close(wide.losses, -advantages * (new - old).exp().nan_to_num(0.0))


@pytest.mark.parametrize("level", list(Unit))
@pytest.mark.parametrize("divergence", list(Divergence))
def test_dppo_at_the_policy_that_sampled_is_reinforce(level, divergence) -> None:
    logprobs = torch.tensor([[-0.1, -3.0, 5.0, -1e-9, -50.0, 0.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, -2.0, 9.0, 3.0, -1.0, 0.5]])
    loss = DivergencePolicyLoss(level=level, divergence=divergence)
    result = loss(logprobs, logprobs.detach(), advantages, MASK, turn=TURN)
    result.losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages * MASK)


@pytest.mark.parametrize(
    ("level", "units"),
    [(Unit.TURN, [[0, 1], [3, 4, 5]]), (Unit.SEQUENCE, [[0, 1, 3, 4, 5]])],
)
def test_dppo_shares_ratio_and_divergence_of_a_unit(level, units) -> None:
    new = torch.tensor([[0.9, 0.5, 0.5, 0.2, 0.6, 0.7]]).log().requires_grad_()
    old = torch.tensor([[0.4, 0.4, 0.1, 0.3, 0.5, 0.6]]).log()
    advantages = torch.tensor([[1.0, 0.5, 1.0, 1.0, -1.0, 2.0]])
    distance = binary_divergence(new.detach(), old, how=Divergence.KL)
    bounds = [float(distance[0, unit].mean()) for unit in units]
    for slack in (1e-3, -1e-3):
        loss = divergence_masked(
            new, old, advantages, MASK, TURN, clip_low=1.0, clip_high=max(bounds) + slack,
            divergence=Divergence.KL, level=level,
        )  # fmt: skip
        expected = torch.zeros(6)
        for unit, bound in zip(units, bounds, strict=True):
            ratio = (new - old)[0, unit].mean().exp().detach()
            own = -advantages[0, unit] * ratio
            masked = (bound > max(bounds) + slack) & (advantages[0, unit] > 0) & (ratio > 1)
            expected[unit] = torch.where(masked, 0.0, own)
        torch.testing.assert_close(loss.losses[0], expected)
        [gradient] = torch.autograd.grad(loss.losses.sum(), new)
        torch.testing.assert_close(gradient[0], expected)
    assert int(loss.clipped_high) > 0


def test_divergence_of_a_token_is_at_most_that_of_the_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    new, old = (
        torch.randn(2, 40, 7, generator=generator, dtype=torch.float64).mul(3).log_softmax(-1)
    )
    whole = {
        Divergence.TV: (new.exp() - old.exp()).abs().sum(-1) / 2,
        Divergence.KL: (old.exp() * (old - new)).sum(-1),
    }
    for how, expected in whole.items():
        found = binary_divergence(new, old, how=how)
        assert bool((found <= expected[:, None] + 1e-6).all()) and float(found.max()) > 0.1
        two = binary_divergence(new[:, :2].log_softmax(-1), old[:, :2].log_softmax(-1), how=how)
        assert torch.allclose(two[:, 0], two[:, 1], atol=1e-6)  # of two outcomes it is all there is
    certain = torch.tensor([0.0, -1e-10, -200.0])
    for how in Divergence:
        assert bool(binary_divergence(certain, certain.flip(0), how=how).isfinite().all())
