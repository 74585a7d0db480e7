"""Reference policies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ragen_pl.models.build import build_small_lm, build_small_vlm
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.reference import AdaptersOff, FrozenCopy, MovingAverage


@pytest.fixture
def policy():
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return PolicyModule(build_small_lm(seed=0, text=small | {"num_key_value_heads": 2}))


def test_moving_average_follows_the_policy_and_a_frozen_copy_does_not(policy) -> None:
    average, frozen = MovingAverage(decay=0.75), FrozenCopy()
    following, staying = average.build(policy), frozen.build(policy)
    name, weight = next(iter(policy.named_parameters()))
    before = weight.detach().clone()
    with torch.no_grad():
        weight += 1.0
    average.follow(following, policy)
    frozen.follow(staying, policy)
    torch.testing.assert_close(dict(following.named_parameters())[name], before + 0.25)
    torch.testing.assert_close(dict(staying.named_parameters())[name], before)


def test_a_frozen_copy_sees_with_its_own_encoder() -> None:
    bundle = build_small_vlm(seed=0)
    image = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    policy = PolicyModule(bundle)
    # the policy's encoder has been used before the copy is made
    before = bundle.images.encode([image]).tokens.detach()
    reference = FrozenCopy().build(policy)
    with torch.no_grad():
        for weight in bundle.model.model.vision.parameters():
            weight += 1.0
    assert torch.equal(reference.bundle.images.encode([image]).tokens, before)
    assert not torch.allclose(bundle.images.encode([image]).tokens, before)


def test_adapters_off_rejects_a_model_without_adapters(policy) -> None:
    with pytest.raises(ValueError, match=r"no adapters to switch off; set model\.build\.lora"):
        AdaptersOff().build(policy)
