"""Families whose layers can't be computed again in the backward pass train without it."""

from __future__ import annotations

import pytest
from support.models.compared_logprobs import play, trajectory_of
from support.models.tiny_families import tiny_bundle

from ragen_pl.data.collate import collate
from ragen_pl.data.settings import UpdateSettings
from ragen_pl.modules.policy import PolicyModule


def test_ctrl_has_layers_and_trains() -> None:
    bundle = tiny_bundle("ctrl", images=False)
    assert [type(layer).__name__ for layer in bundle.layers] == ["EncoderLayer"] * 2
    assert not bundle.checkpoints_layers
    episodes = play(bundle, window="all", keep=True)
    batch = collate([trajectory_of(episode, n) for n, episode in enumerate(episodes)], bundle)
    policy = PolicyModule(bundle).train()
    policy(batch.samples, batch.images).logprobs.sum().backward()
    gradients = {name: weight.grad for name, weight in policy.named_parameters()}
    assert all(gradient is not None and bool(gradient.any()) for gradient in gradients.values())


def test_ctrl_is_refused_with_checkpointing() -> None:
    bundle = tiny_bundle("ctrl", images=False)
    with pytest.raises(ValueError, match=r"update\.gradient_checkpointing=true: CTRL"):
        PolicyModule(bundle, update=UpdateSettings(gradient_checkpointing=True))
