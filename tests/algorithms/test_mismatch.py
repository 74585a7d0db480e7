"""Weights against the mismatch of engine and trainer, by hand."""

from __future__ import annotations

import pytest
import torch

from ragen_pl.algorithms.mismatch import Level, MaskedWeights, TruncatedWeights, importance_ratio

TURN = torch.tensor([[0, 0, -1, 1, 1, 1]])
MASK = TURN >= 0


def test_mismatch_weights_of_tokens_and_responses() -> None:
    trainer = torch.tensor([[0.5, 0.2, 9.0, 0.0, 0.0, -1.0]])
    token = importance_ratio(trainer, torch.zeros(1, 6), TURN, level=Level.TOKEN)
    torch.testing.assert_close(token[MASK], trainer[MASK].exp())
    response = importance_ratio(trainer, torch.zeros(1, 6), TURN, level=Level.SEQUENCE)
    expected = torch.tensor([0.7, 0.7, -1.0, -1.0, -1.0]).exp()
    torch.testing.assert_close(response[MASK], expected)
    cut = TruncatedWeights(cap=1.1)(trainer, torch.zeros(1, 6), TURN)
    torch.testing.assert_close(cut[MASK], trainer[MASK].exp().clamp(max=1.1))
    kept = MaskedWeights(low=0.5, high=1.5)(trainer, torch.zeros(1, 6), TURN)
    assert kept[MASK].tolist() == pytest.approx([0.0, 1.2214, 1.0, 1.0, 0.0], abs=1e-4)
