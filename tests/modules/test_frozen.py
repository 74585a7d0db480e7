"""Checkpoints without weights that no step changes."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from ragen_pl.data.settings import WarmStartSettings
from ragen_pl.models.adapters import choose_trained_weights
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.frozen import FINGERPRINTS, fingerprint, frozen_names
from ragen_pl.modules.losses import ReferenceKL, UpdateLoss
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.reference import FrozenCopy, InitialPolicy, MovingAverage
from ragen_pl.modules.warm_start import WarmStartModule

LORA = {"r": 2}


def agent_of(make, *, reference=None, lora=LORA, seed: int = 0):
    agent = make.agent(seed=seed)
    choose_trained_weights(agent.policy.model, lora=lora)
    loss = UpdateLoss(kl=ReferenceKL(coefficient=0.1, reference=reference or InitialPolicy()))
    made = type(agent)(
        agent.policy,
        agent.critic,
        estimator=agent.estimator,
        masks=agent.masks,
        loss=loss,
        optimizer=agent.optimizer_factory,
        engine=agent.engine_factory,
    )
    made.trainer = agent.trainer
    return made


def checkpoint_of(module) -> dict:
    """Return what Lightning hands to the hook, and what the hook makes of it."""
    checkpoint = {"state_dict": dict(module.state_dict())}
    module.on_save_checkpoint(checkpoint)
    return checkpoint


def train(module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += 0.1


@pytest.mark.parametrize(
    ("reference", "kept"),
    [(InitialPolicy(), 0), (FrozenCopy(), 0), (MovingAverage(decay=0.5), 1)],
    ids=["initial", "copy", "average"],
)
def test_checkpoint_holds_what_steps_change(make, reference, kept):
    agent = agent_of(make, reference=reference)
    names = checkpoint_of(agent)["state_dict"].keys()
    trained = {name for name, weight in agent.named_parameters() if weight.requires_grad}
    assert trained <= names
    rest = names - trained
    assert all(name.startswith("reference.") and "lora_" in name for name in rest)
    assert bool(rest) is bool(kept)


def test_frozen_weights_are_completed_on_load(make):
    agent = agent_of(make)
    train(agent)
    checkpoint = checkpoint_of(agent)
    other = agent_of(make)
    other.on_load_checkpoint(checkpoint)
    other.load_state_dict(checkpoint["state_dict"])  # strict
    expected = agent.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def test_small_checkpoint_of_a_run_with_adapters(make, tmp_path: Path):
    """The size of the file, not the number of its entries, since tensors may share a storage."""
    sizes = {}
    for name, lora in (("full", None), ("adapters", LORA)):
        file = tmp_path / name
        torch.save(checkpoint_of(agent_of(make, lora=lora))["state_dict"], file)
        sizes[name] = file.stat().st_size
    assert sizes["adapters"] < 0.25 * sizes["full"]


def test_changed_base_is_refused(make):
    checkpoint = checkpoint_of(agent_of(make))
    assert set(checkpoint[FINGERPRINTS]) == {"policy"}
    other = agent_of(make, seed=1)
    with pytest.raises(ValueError, match=r"policy's frozen weights .* give model\.build\.path as"):
        other.on_load_checkpoint(checkpoint)
    changed = agent_of(make)
    changed.policy.model.config.rope_parameters = {"rope_type": "default", "rope_theta": 7.0}
    with pytest.raises(ValueError, match="their config changed"):
        changed.on_load_checkpoint(checkpoint)


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
@pytest.mark.parametrize("freeze", [False, True], ids=["evaluated", "resumed"])
def test_weights_that_were_frozen_later_are_those_of_the_checkpoint(make, lora, freeze):
    """An evaluation freezes none of them, and a run that goes on may have others before it loads its checkpoint."""

    def policy_of(*, trained: bool, freeze: bool) -> WarmStartModule:
        bundle = make.bundle(images=True)
        choose_trained_weights(bundle.model, lora=lora, freeze_projector=False)
        module = WarmStartModule(
            PolicyModule(bundle), None, optimizer=functools.partial(torch.optim.AdamW, lr=1e-3)
        )
        module.trainer = make.agent().trainer
        if trained:
            train(module)
        if freeze:
            module.policy.freeze_vision()
        return module

    saved = policy_of(trained=True, freeze=True)
    checkpoint = checkpoint_of(saved)
    assert saved.policy.frozen_later <= {
        name.removeprefix("policy.") for name in checkpoint["state_dict"]
    }
    other = policy_of(trained=False, freeze=freeze)
    loaded = {key: checkpoint[key] for key in ("state_dict", FINGERPRINTS)}
    other.on_load_checkpoint(loaded)
    other.load_state_dict(loaded["state_dict"])
    for name, weight in other.policy.named_parameters():
        assert torch.equal(weight, saved.policy.get_parameter(name)), name


def test_changed_initial_weights_of_a_reference_are_refused(make):
    checkpoint = checkpoint_of(agent_of(make, lora=None))
    assert set(checkpoint[FINGERPRINTS]) == {"reference"}
    other = agent_of(make, lora=None, seed=1)
    with pytest.raises(ValueError, match=r"reference's frozen weights .* warm_start\.pt"):
        other.on_load_checkpoint(checkpoint)


def test_fingerprint_is_of_the_weights_and_not_of_their_type(make):
    model = make.agent().policy.model
    assert fingerprint(model) == {}
    model.requires_grad_(False)
    whole = fingerprint(model)
    assert fingerprint(model.to(torch.bfloat16)) == whole
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert fingerprint(model)["weights"] != whole["weights"]


def test_warm_start_of_adapters_saves_them_alone(make):
    agent = agent_of(make)
    module = WarmStartModule(
        agent.policy,
        agent.critic,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        settings=WarmStartSettings(steps=1),
    )
    module.trainer = agent.trainer
    assert (
        frozen_names(module)
        and not frozen_names(module) & checkpoint_of(module)["state_dict"].keys()
    )


def test_own_critic_with_adapters_leaves_its_base_out(make):
    bundle = make.bundle(seed=3)
    choose_trained_weights(bundle.model, lora=LORA)
    critic = CriticModule(bundle.hidden_size, backbone=bundle)
    assert frozen_names(critic) and not any("lora_" in name for name in frozen_names(critic))
    assert all(name.startswith("model.") for name in frozen_names(critic))
    assert not frozen_names(PolicyModule(make.bundle()))
