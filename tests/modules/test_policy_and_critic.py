"""Policy and critic alone in a plain Trainer, and inside the agent."""

from __future__ import annotations

import functools

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from ragen_pl.data.conversations import conversation_batch
from ragen_pl.data.settings import WarmStartSettings
from ragen_pl.modules.critic import CriticModule
from ragen_pl.modules.muon import MuonAdamW
from ragen_pl.modules.policy import PolicyModule, TokenReadout
from ragen_pl.modules.warm_start import WarmStartModule
from ragen_pl.prompts.context import ContextManager

FAST = functools.partial(torch.optim.AdamW, lr=3e-3)


class Curve(pl.Callback):
    """Keep a logged metric of every step, and the modes of the modules."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[float] = []
        self.modes: set[bool] = set()

    def on_train_batch_end(self, trainer, module, *args) -> None:
        self.values.append(float(trainer.callback_metrics[self.name]))
        self.modes |= {submodule.training for submodule in module.modules()}


def train(module, minibatch, *, metric, steps=30):
    curve = Curve(metric)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, max_epochs=steps, callbacks=[curve],
    )  # fmt: skip
    trainer.fit(module, DataLoader([minibatch], batch_size=None))
    return curve


def test_policy_alone_learns_the_responses(make):
    agent = make.agent()
    minibatch = make.minibatch(make.batch(agent))
    policy = PolicyModule(make.bundle(seed=4), optimizer=FAST)
    curve = train(policy, minibatch, metric="train/loss")
    assert curve.modes == {True}  # models are built in eval mode
    assert curve.values[0] > 5 and curve.values[-1] < curve.values[0] - 1


def test_critic_alone_regresses_the_returns(make):
    agent = make.agent()
    minibatch = make.minibatch(make.batch(agent))
    critic = CriticModule(32, backbone=make.bundle(seed=4), optimizer=FAST)
    curve = train(critic, minibatch, metric="train/value_loss", steps=60)
    assert curve.modes == {True}
    returns = minibatch.samples.returns[minibatch.samples.advantage_mask]
    assert curve.values[0] == pytest.approx(
        float((returns**2).mean()), rel=1e-4
    )  # heads start at 0
    assert curve.values[-1] < 0.2 * float(returns.var())


def test_critic_alone_needs_a_backbone(make):
    minibatch = make.minibatch(make.batch(make.agent()))
    with pytest.raises(ValueError, match="give it a backbone to use it alone"):
        CriticModule(32).training_step(minibatch, 0)


@pytest.mark.parametrize("module", ["policy", "critic"])
def test_module_alone_has_a_default_optimizer(make, module):
    made = PolicyModule(make.bundle()) if module == "policy" else CriticModule(32)
    optimizer = made.configure_optimizers()
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in weights} == {id(p) for p in made.parameters()}


def test_detached_critic_gives_the_policy_no_gradient(make):
    for detach in (False, True):
        agent = make.agent()
        agent.critic.detach_states = detach
        samples = make.batch(agent).samples
        readout = TokenReadout(critic=agent.critic)
        scores = agent.policy(samples, torch.zeros(0), readout=readout)
        agent.zero_grad()
        scores.values.sum().backward()
        reached = any(
            parameter.grad is not None and bool(parameter.grad.any())
            for parameter in agent.policy.parameters()
        )
        assert reached is not detach


def test_agent_state_is_that_of_policy_and_critic(make):
    agent = make.agent(own_critic=True, seed=0)
    state = agent.state_dict()
    other = make.agent(own_critic=True, seed=7)
    for name in ("policy", "critic"):
        part = {
            key.removeprefix(f"{name}."): value
            for key, value in state.items()
            if key.startswith(f"{name}.")
        }
        getattr(other, name).load_state_dict(part)  # strict: nothing missing, nothing more
    known = other.state_dict()
    assert known.keys() == state.keys()
    assert all(torch.equal(value, known[key]) for key, value in state.items())


@pytest.mark.parametrize("own_critic", [None, False, True], ids=["none", "shared", "own"])
def test_warm_start_trains_policy_and_critic(make, own_critic):
    agent = make.agent()
    minibatch = make.minibatch(make.batch(agent))
    backbone = make.bundle(seed=5) if own_critic else None
    critic = None if own_critic is None else CriticModule(32, backbone=backbone)
    module = WarmStartModule(
        PolicyModule(make.bundle(seed=4)),
        critic,
        optimizer=FAST,
        settings=WarmStartSettings(steps=40, warm_up=1),
    )
    curve = train(module, minibatch, metric="warm_start/loss", steps=40)
    assert curve.modes == {True}
    assert curve.values[-1] < curve.values[0] - 1
    if critic is not None:
        module.zero_grad()
        value = module.trainer.callback_metrics["warm_start/value_loss"]
        mask = minibatch.samples.loss_mask
        start = 0.5 * float((minibatch.samples.returns[mask] ** 2).mean())
        assert float(value) < 0.6 * start


def test_warm_start_learning_rate_rises_then_falls(make):
    module = WarmStartModule(
        PolicyModule(make.bundle()),
        None,
        optimizer=FAST,
        settings=WarmStartSettings(steps=100, warm_up=10, learning_rate_end=0.1),
    )
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    rates = []
    for _ in range(101):
        rates.append(optimizer.param_groups[0]["lr"] / 3e-3)
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9]
    assert rates[50] == pytest.approx(0.55) and rates[100] == pytest.approx(0.1)


def conversations(count: int) -> list[list[dict[str, str]]]:
    return [
        [
            {"role": "user", "content": f"say {number}"},
            {"role": "assistant", "content": f"it is {number * number}"},
        ]
        for number in range(count)
    ]


@pytest.mark.parametrize("optimizer", [None, functools.partial(MuonAdamW, lr=3e-3)])
def test_a_data_loader_of_conversations_and_lightnings_own_callbacks_work(
    make, tmp_path, optimizer
) -> None:
    policy = PolicyModule(make.bundle(seed=4), optimizer=optimizer)
    context = ContextManager(policy.bundle, window="all", system_prompt=None)
    loader = DataLoader(
        conversations(6),
        batch_size=4,
        collate_fn=functools.partial(conversation_batch, context=context),
    )
    trainer = pl.Trainer(
        accelerator="cpu", logger=CSVLogger(tmp_path), enable_checkpointing=False, max_epochs=4,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        callbacks=[LearningRateMonitor()],
    )  # fmt: skip
    trainer.fit(policy, loader)
    assert trainer.global_step == 8  # two batches of each epoch
    rates = {name: value for name, value in trainer.callback_metrics.items() if "lr" in name}
    assert len(rates) == len(trainer.optimizers[0].param_groups) > 1
