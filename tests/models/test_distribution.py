"""Entropy of the distribution that tokens are sampled from."""

import math

import pytest
import torch

from ragen_pl.models.distribution import entropy, log_distribution


def test_entropy_by_hand_with_a_banned_token() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25, 0.4], [1.0, 1e-30, 1e-30, 0.3]]).log().requires_grad_()
    log_probs = log_distribution(logits, banned=torch.tensor([3]))
    assert entropy(log_probs).tolist() == pytest.approx([1.5 * math.log(2), 0.0])
    assert entropy(log_distribution(logits.half())).dtype == torch.float32
    entropy(log_probs)[0].backward()
    assert logits.grad[0].isfinite().all()
