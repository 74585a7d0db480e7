"""What the config asks of optimizer and schedule at a resume takes effect, a line says so, and the state is kept."""

from __future__ import annotations

import functools
import logging

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from ragen_pl.assembly.weights import check_resumable
from ragen_pl.config.errors import ConfigError
from ragen_pl.loops.rollout_update import RolloutUpdate
from ragen_pl.modules.muon import MuonAdamW
from ragen_pl.modules.optimized import RECORD, resume_problem
from ragen_pl.modules.optimizers import MasterWeights, module_name
from ragen_pl.modules.settings import OptimizationSettings

QUIET = {
    "max_epochs": 3, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
}  # fmt: skip
FIRST = {"lr": 3e-3, "weight_decay": 0.0, "betas": (0.9, 0.99)}


class Enough(Exception):
    """The Trainer has come far enough."""


class SaveInSecondIteration(pl.Callback):
    """Write a checkpoint inside the second iteration, and end."""

    def __init__(self, file) -> None:
        self.file = file

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.file)
            raise Enough


class Look(pl.Callback):
    """Keep the settings and the state of the optimizer before its first step, and end."""

    def on_train_batch_start(self, trainer, module, *_) -> None:
        (optimizer,) = trainer.optimizers
        names = {id(weight): name for name, weight in module.named_parameters()}
        self.groups = [
            {"names": [names[id(weight)] for weight in group["params"]]}
            | {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        optimizer.state_dict()
        self.moments = {
            names[id(weight)]: {
                key: value.clone() for key, value in state.items() if key.startswith("exp_avg")
            }
            for weight, state in optimizer.state.items()
        }
        self.classes = (type(optimizer), getattr(optimizer, "_copied", None))
        raise Enough

    def of(self, name: str) -> list[dict]:
        return [group for group in self.groups if module_name(group) == name]


def fit(
    setup, callback, *, factory, optimization=None, critic_rate=None, ckpt_path=None, **trainer
):
    agent, datamodule = setup.build()
    agent.optimizer_factory, agent.critic_learning_rate = factory, critic_rate
    agent.optimization = optimization or OptimizationSettings(learning_rate_end=0.1)
    loop = pl.Trainer(**(QUIET | trainer), callbacks=[RolloutUpdate(), callback])
    with pytest.raises(Enough):
        loop.fit(agent, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=False)
    return agent, callback


def adamw(**changes):
    return functools.partial(torch.optim.AdamW, **(FIRST | changes))


def muon(**changes):
    return functools.partial(MuonAdamW, **(FIRST | changes))


def factor(iteration: int, *, end: float = 0.1, iterations: int = 3) -> float:
    return 1.0 - (1.0 - end) * iteration / iterations


@pytest.fixture(scope="module")
def saved_by(setup_of, tmp_path_factory):
    """Return a function that makes a checkpoint inside the second iteration, once for each kind."""

    @functools.cache
    def save(kind: str):
        setup = setup_of(**({"dtype": torch.bfloat16} if kind == "bfloat16" else {}))
        file = tmp_path_factory.mktemp(kind) / "inside.ckpt"
        factory = muon() if kind == "muon" else adamw()
        fit(setup, SaveInSecondIteration(file), factory=factory, critic_rate=1e-2)
        _, before = fit(setup, Look(), factory=factory, critic_rate=1e-2, ckpt_path=str(file))
        return setup, file, before

    return save


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "muon"])
def test_settings_of_every_group_take_effect_and_the_state_is_kept(saved_by, kind, caplog):
    setup, file, before = saved_by(kind)
    make = muon if kind == "muon" else adamw
    # what is as it was stays as the checkpoint has it
    assert {group["lr"] for group in before.of("policy")} == {3e-3 * factor(1)}
    assert {group["lr"] for group in before.of("critic")} == {1e-2 * factor(1)}
    with caplog.at_level(logging.INFO, logger="ragen_pl"):
        _, after = fit(
            setup, Look(), factory=make(lr=1e-5, betas=(0.8, 0.95), weight_decay=0.1),
            critic_rate=2e-4, ckpt_path=str(file),
        )  # fmt: skip
    assert {group["lr"] for group in after.of("policy")} == {1e-5 * factor(1)}
    assert {group["lr"] for group in after.of("critic")} == {2e-4 * factor(1)}
    decays = {group["weight_decay"] for group in after.of("policy")}
    # not of norms and biases, which are a group of their own now
    assert decays == {0.0, 0.1} and len(after.groups) > len(before.groups)
    names = [group["name"] for group in after.groups]
    assert len({*names}) == len(names)
    assert {tuple(group["betas"]) for group in after.groups if "betas" in group} == {(0.8, 0.95)}
    assert before.moments.keys() == after.moments.keys() and before.moments
    for name, state in before.moments.items():
        assert all(torch.equal(value, after.moments[name][key]) for key, value in state.items())
    assert before.classes == after.classes
    assert kind != "bfloat16" or after.classes == (MasterWeights, True)
    (line,) = [text for text in caplog.messages if "changed since the checkpoint" in text]
    for text in (
        "lr of the policy 0.003 -> 1e-05",
        "lr of the critic 0.01 -> 0.0002",
        "weight_decay of the policy 0 -> 0.1",
        "betas of the policy [0.9, 0.99] -> [0.8, 0.95]",
    ):
        assert line.count(text) == 1


@pytest.mark.parametrize(
    ("kind", "settings", "more"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, {"max_exp_avg_sq"}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}, {"grad_avg", "momentum_buffer"}),
        (torch.optim.SGD, {"momentum": 0.9}, {"momentum_buffer"}),
    ],
    ids=["AMSGrad", "RMSprop", "SGD"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_settings_that_need_more_state_take_effect(setup_of, kind, settings, more, dtype, tmp_path):
    class OneStep(pl.Callback):
        def on_train_batch_end(self, trainer, *_) -> None:
            (optimizer,) = trainer.optimizers
            optimizer.state_dict()
            self.entries = set.intersection(*(set(state) for state in optimizer.state.values()))
            raise Enough

    setup, file = setup_of(dtype=dtype, max_mismatch=None), tmp_path / "inside.ckpt"
    factory = functools.partial(kind, lr=1e-4)
    fit(setup, SaveInSecondIteration(file), factory=factory)
    changed = functools.partial(factory, **settings)
    _, step = fit(setup, OneStep(), factory=changed, ckpt_path=str(file))
    assert more <= step.entries


def test_what_is_as_it_was_is_left_alone_and_said_by_no_line(saved_by, caplog):
    setup, file, before = saved_by("float32")
    checkpoint = torch.load(file, weights_only=False)
    # a callback has lowered the rates
    (schedule,), (state,) = checkpoint["lr_schedulers"], checkpoint["optimizer_states"]
    schedule["base_lrs"] = [rate / 2 for rate in schedule["base_lrs"]]
    for group in state["param_groups"]:
        group["lr"] /= 2
    lowered = file.with_name("lowered.ckpt")
    torch.save(checkpoint, lowered)
    with caplog.at_level(logging.INFO, logger="ragen_pl"):
        same = {"factory": adamw(), "critic_rate": 1e-2, "ckpt_path": str(lowered)}
        _, after = fit(setup, Look(), **same)
    assert [group["lr"] for group in after.groups] == [group["lr"] / 2 for group in before.groups]
    assert not [text for text in caplog.messages if "changed since" in text]


@pytest.mark.parametrize(
    ("settings", "trainer", "expected", "text"),
    [
        ({"learning_rate_end": 1.0}, {}, 1.0, "learning_rate_end 0.1 -> 1"),
        (
            {"learning_rate_end": 0.1, "learning_rate_warm_up": 4},
            {},
            0.5 * factor(1),
            "learning_rate_warm_up 0 -> 4",
        ),
        (
            {"learning_rate_end": 0.1},
            {"max_epochs": 30},
            factor(1, iterations=30),
            "trainer.max_epochs 3 -> 30",
        ),
    ],
)
def test_a_schedule_takes_effect_at_once(saved_by, settings, trainer, expected, text, caplog):
    setup, file, _ = saved_by("float32")
    with caplog.at_level(logging.INFO, logger="ragen_pl"):
        _, after = fit(
            setup, Look(), factory=adamw(), optimization=OptimizationSettings(**settings),
            critic_rate=1e-2, ckpt_path=str(file), **trainer,
        )  # fmt: skip
    rates = [group["lr"] for group in (*after.of("policy"), *after.of("critic"))]
    assert rates == pytest.approx([3e-3 * expected, 1e-2 * expected])
    (line,) = [message for message in caplog.messages if "changed since" in message]
    assert text in line


def test_a_checkpoint_of_an_earlier_version_has_its_rates_alone(saved_by):
    setup, file, _ = saved_by("float32")
    checkpoint = torch.load(file, weights_only=False)
    del checkpoint[RECORD]
    earlier = file.with_name("earlier.ckpt")
    torch.save(checkpoint, earlier)
    changed = {"factory": adamw(lr=1e-5), "critic_rate": 1e-2, "ckpt_path": str(earlier)}
    _, after = fit(setup, Look(), **changed)
    assert [group["lr"] for group in after.of("policy")] == [1e-5 * factor(1)]
    agent, _ = setup.build()
    agent.optimizer_factory = functools.partial(torch.optim.SGD, lr=1e-3)
    with pytest.raises(ConfigError, match=r"its optimizer has no dampening, so it is not torch"):
        check_resumable(earlier, agent, needed="agent", trusted=True)


def test_a_warm_start_takes_its_settings_too(warm_start, tmp_path, caplog):
    file = tmp_path / "warm_start.ckpt"

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, *_) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(file)
                raise Enough

    def run(callback, **changes):
        module, demonstrations = warm_start(steps=8)
        for name, value in changes.items():
            setattr(module, name, value)
        trainer = pl.Trainer(**(QUIET | {"max_steps": 8, "max_epochs": -1}), callbacks=[callback])
        with pytest.raises(Enough):
            ckpt_path = str(file) if file.exists() else None
            trainer.fit(module, datamodule=demonstrations, ckpt_path=ckpt_path, weights_only=False)
        return callback

    run(Save())
    before = run(Look())
    factory = functools.partial(torch.optim.AdamW, lr=1e-4)
    with caplog.at_level(logging.INFO, logger="ragen_pl"):
        after = run(Look(), optimizer_factory=factory)
    rates = [group["lr"] for group in (*before.groups, *after.groups)]
    assert rates[len(before.groups) :] == pytest.approx(
        [rate / 100 for rate in rates[: len(before.groups)]]
    )
    assert any(text.startswith("warm_start.optimizer: changed since") for text in caplog.messages)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (
            functools.partial(torch.optim.SGD, lr=1e-3),
            r"torch\.optim\.adamw\.AdamW, not torch\.opt",
        ),
        (
            muon(),
            r"its optimizer is torch\.optim\.adamw\.AdamW, not ragen_pl\.modules\.muon\.MuonAdamW",
        ),
        (None, r"its optimizer trains policy\..*norm\.weight"),
    ],
)
def test_an_optimizer_that_can_not_continue_is_refused_in_one_line(saved_by, factory, text):
    setup, file, _ = saved_by("float32")
    agent, _ = setup.build()
    agent.optimizer_factory = factory or adamw()
    if factory is None:
        agent.policy.model.model.norm.weight.requires_grad_(False)
        agent.policy.frozen_later.add("model.model.norm.weight")
    with pytest.raises(ConfigError, match=text) as raised:
        check_resumable(file, agent, needed="agent", trusted=True)
    assert f"warm_start.weights={file}" in str(raised.value) and "\n" not in str(raised.value)
    agent, _ = setup.build()
    agent.optimizer_factory = adamw(lr=1.0, weight_decay=0.3)
    check_resumable(file, agent, needed="agent", trusted=True)


def test_an_optimizer_continues_whose_class_had_another_module(saved_by):
    setup, _, _ = saved_by("float32")
    agent, _ = setup.build()
    agent.optimizer_factory = muon()
    assert agent.record()["class"] == "ragen_pl.modules.muon.MuonAdamW"
    saved = agent.record() | {"class": "ragen_pl.muon.MuonAdamW"}
    assert resume_problem({RECORD: saved}, agent) is None


@pytest.mark.parametrize("make", [adamw, muon])
def test_lightnings_learning_rate_monitor_shows_every_group(setup_of, make, tmp_path):
    setup = setup_of(learning_rate=3e-3)
    agent, datamodule = setup.build()
    agent.optimizer_factory = make(weight_decay=0.1)
    monitor = LearningRateMonitor()
    trainer = pl.Trainer(
        **(QUIET | {"max_epochs": 1, "logger": CSVLogger(tmp_path)}),
        callbacks=[RolloutUpdate(), monitor],
    )
    trainer.fit(agent, datamodule=datamodule)
    (optimizer,) = trainer.optimizers
    shown = {name.partition("/")[2] for name in monitor.lrs}
    assert shown == {group["name"] for group in optimizer.param_groups}
    assert {"policy/vectors", "critic/vectors"} < shown
