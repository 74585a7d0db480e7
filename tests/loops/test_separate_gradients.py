"""The gradient of the penalty on the divergence, clipped apart from that of the other terms."""

from __future__ import annotations

import math

import pytest
import torch

NAME = "update/gradient_norm_kl"


def weights_of(agent) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in agent.named_parameters()}


def norms_of(points) -> list[float]:
    return [point[NAME] for _, point in points if NAME in point]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_without_a_clip_both_passes_are_one(setup_of, accumulate):
    trainer = {"gradient_clip_val": None, "accumulate_grad_batches": accumulate}
    one, points, _ = setup_of(trainer=trainer).fit(max_epochs=2)
    assert norms_of(points) == []
    two, points, _ = setup_of(trainer=trainer, kl={"clip_norm": 1e6}).fit(max_epochs=2)
    first, second = norms_of(points)
    assert 0.0 < first < math.inf and 0.0 < second < math.inf
    for name, weight in weights_of(one).items():
        assert torch.allclose(weight, weights_of(two)[name], rtol=0.0, atol=2e-5), name


def test_a_large_penalty_leaves_the_gradient_of_the_others(setup_of):
    """With one norm for both, a penalty of 1,000 decides where the policy goes; apart it stays at its own norm."""
    kl = {"coefficient": 1000.0}
    largest = {}
    for clip_norm in (None, 1e-3):
        _, points, _ = setup_of(kl=kl | {"clip_norm": clip_norm}).fit(max_epochs=2)
        norms = [
            p["update/gradient_norm_policy"]
            for _, p in points
            if "update/gradient_norm_policy" in p
        ]
        largest[clip_norm] = max(norms)
    assert largest[None] > 20 * largest[1e-3]


def test_a_penalty_that_is_not_finite_skips_the_step(setup_of):
    setup = setup_of(kl={"clip_norm": 1.0, "coefficient": 1e38}, max_skipped_steps=100)
    agent, points, _ = setup.fit(max_epochs=1)
    assert all(weight.isfinite().all() for weight in weights_of(agent).values())
    assert sum(point.get("update/skipped_steps", 0) for _, point in points) >= 1
