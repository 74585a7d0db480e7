"""Reference policies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ragen_pl.data.settings import UpdateSettings
from ragen_pl.models.adapters import choose_trained_weights
from ragen_pl.models.build import build_small_lm, build_small_vlm
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.reference import (
    AdaptersOff,
    FrozenCopy,
    InitialPolicy,
    MovingAverage,
    WithoutAdapters,
)

LORA = {"r": 2}


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


def logits(policy) -> torch.Tensor:
    with torch.no_grad():
        return policy.bundle.model(input_ids=torch.arange(8, 24).view(2, 8)).logits


def change(policy, by: float) -> None:
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight += by


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_average_is_kept_in_float32(policy, dtype) -> None:
    """A weight of 1 in bfloat16 has its neighbors 0.004 and 0.008 away, and would stay where it is."""
    policy.to(dtype)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.fill_(1.0)
    average = MovingAverage(decay=0.9)
    reference = average.build(policy)
    assert {weight.dtype for weight in reference.parameters()} == {dtype}
    with torch.no_grad():
        for weight in policy.parameters():
            weight.fill_(1.0078125)
    for _ in range(50):
        average.follow(reference, policy)
    assert all(bool((weight.float() > 1.004).all()) for weight in reference.parameters())
    restored = average.build(policy)
    restored.load_state_dict(reference.state_dict())
    for one in (reference, restored):
        average.follow(one, policy)
    states = reference.state_dict(), restored.state_dict()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize("reference", [FrozenCopy(), MovingAverage()])
def test_copy_shares_what_is_not_trained(policy, reference) -> None:
    choose_trained_weights(policy.model, lora=LORA)
    change(policy, 0.05)
    learned, copied = logits(policy), reference.build(policy)
    own = {id(weight) for weight in copied.parameters()} - {id(one) for one in policy.parameters()}
    assert len(own) == sum(weight.requires_grad for weight in policy.parameters())
    assert torch.equal(logits(copied), learned)
    change(policy, 0.05)
    assert torch.equal(logits(copied), learned) and not torch.equal(logits(policy), learned)
    assert any(weight.requires_grad for weight in policy.parameters())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("reference", [FrozenCopy(), MovingAverage()])
def test_a_copy_computes_rows_as_the_policy_does(packed, reference) -> None:
    update = UpdateSettings(packed=packed, share_prefix=False)
    copied = reference.build(PolicyModule(build_small_lm(seed=0), update=update)).bundle
    assert (copied.packs_rows, copied.shares_prefix) == (packed, False)


def test_initial_policy_is_the_model_without_new_adapters_and_a_copy_otherwise(policy) -> None:
    assert isinstance(InitialPolicy().build(policy), PolicyModule)
    choose_trained_weights(policy.model, lora=LORA)
    assert isinstance(InitialPolicy().build(policy), WithoutAdapters)
    # a warm start has trained them
    change(policy, 0.05)
    learned, reference = logits(policy), InitialPolicy().build(policy)
    change(policy, 0.05)
    assert torch.equal(logits(reference), learned)


def test_adapters_of_a_frozen_encoder_stay_frozen() -> None:
    """A checkpoint names the trained weights, and the optimizer has no others."""
    policy = PolicyModule(build_small_vlm(seed=0))
    choose_trained_weights(policy.model, lora=LORA, freeze_vision=False)
    policy.freeze_vision()
    before = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert policy.frozen_later and before.isdisjoint(policy.frozen_later)
    reference = AdaptersOff().build(policy)
    reference.lm_head(torch.zeros(1, policy.bundle.hidden_size))
    after = {name for name, weight in policy.named_parameters() if weight.requires_grad}
    assert after == before


def test_adapters_off_rejects_other_trained_weights(policy) -> None:
    choose_trained_weights(policy.model, lora=LORA)
    policy.model.get_output_embeddings().weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"trains other weights too, .* or use FrozenCopy"):
        AdaptersOff().build(policy)
    assert isinstance(InitialPolicy().build(policy), PolicyModule)


def test_copy_in_the_compute_dtype_computes_the_same(policy) -> None:
    reference = FrozenCopy().build(policy)
    FrozenCopy().store(reference, policy, torch.bfloat16)
    bits = {weight.dtype: 0 for weight in reference.parameters()}
    for weight in reference.parameters():
        bits[weight.dtype] += weight.numel()
    # embedding and norms stay
    embedding = reference.bundle.model.get_input_embeddings().weight
    assert embedding.dtype is torch.float32
    assert set(bits) == {torch.float32, torch.bfloat16}
    assert bits[torch.float32] - embedding.numel() < 0.1 * bits[torch.bfloat16]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(reference), logits(policy))
