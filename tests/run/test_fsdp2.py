"""Strategies by name and class, and whole jobs of two ranks with sharded weights: killed, resumed, exported."""

from __future__ import annotations

import shutil
import signal

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf
from support.runs.module_process import run_module
from support.runs.small_runs import LIMIT_S
from torch.utils._pytree import tree_flatten_with_path
from transformers import AutoModelForCausalLM

from ragen_pl.run import strategy_rules
from ragen_pl.run.strategy import FSDP2Strategy
from ragen_pl.run.trainer import build_trainer

FSDP2 = ("trainer.devices=2", "trainer.strategy=fsdp2")
SHARDED = (
    "trainer.devices=2",
    "trainer.strategy={_target_: ragen_pl.run.strategy.FSDP2Strategy, sharded_checkpoints: true}",
)
DDP = ("trainer.devices=2", "trainer.strategy=ddp")


@pytest.mark.slow
@pytest.mark.soak
def test_a_sharded_job_killed_or_stopped_anywhere_ends_bit_identical(job):
    reference, killed = job(), job()
    settings = (
        *FSDP2,
        "trainer.accumulate_grad_batches=2",
        "warm_start.checkpoint_every_n_steps=4",
        "callbacks.checkpoint.every_n_epochs=1",
        "trainer.max_epochs=2",
    )
    reference.run(*settings)
    killed.kill_at("warm_start-6", *settings, "ckpt_path=auto", rank=1)
    assert (killed.folder / "warm_start.ckpt").exists()
    killed.stop_at("trained-3", *settings, "ckpt_path=auto", rank=1)
    # the step under way is finished
    assert killed.steps == 4
    kill = (
        "+callbacks.kill._target_=support.runs.killing.SaveAndKill",
        "+callbacks.kill.iteration=1",
    )
    killed.run(*settings, *kill, "ckpt_path=auto", codes=(-signal.SIGKILL, 1))
    last = torch.load(killed.folder / "checkpoints" / "last.ckpt", weights_only=True)
    # inside an optimizer step, with each rank's part of the gradient
    states = last["loops"]["fit_loop"]["state_dict"]["gradients"]
    assert [entry["name"] for entry in states["files"]] == ["gradients_0.pt", "gradients_1.pt"]
    killed.kill_at("validation-1", *settings, "ckpt_path=auto", rank=0)
    killed.run(*settings, "ckpt_path=auto")
    assert killed.differs_from(reference) == []


@pytest.mark.slow
@pytest.mark.soak
def test_copies_of_bfloat16_weights_and_a_moving_reference_are_resumed_exactly(job):
    reference, killed = job(), job()
    settings = (
        *FSDP2,
        "model.build.dtype=bfloat16",
        "algorithm.loss.kl.reference={_target_: ragen_pl.modules.reference.MovingAverage}",
        "warm_start.enabled=false",
        "trainer.max_epochs=2",
        "callbacks.checkpoint.every_n_epochs=1",
    )
    reference.run(*settings)
    killed.kill_at("begin-1", *settings, "ckpt_path=auto")
    killed.run(*settings, "ckpt_path=auto")
    assert any("average_" in name for name in killed.weights)
    assert killed.differs_from(reference) == []


@pytest.mark.slow
def test_a_sharded_checkpoint_holds_what_a_whole_one_does(job):
    whole, sharded = job(), job()
    settings = (
        "warm_start.enabled=false",
        "validation.baselines=null",
        "trainer.max_epochs=1",
        "callbacks.best=null",
    )
    whole.run(*FSDP2, *settings, launched=False)
    sharded.run(*SHARDED, *settings, launched=False)
    file = sharded.folder / "checkpoints" / "last.ckpt"
    alone = torch.load(file, weights_only=True)
    assert not alone["state_dict"] and (file.parent / alone["shards"]).is_dir()
    # each rank has written its part
    assert len(list((file.parent / alone["shards"]).glob("*.distcp"))) == 2
    assert sharded.differs_from(whole) == []
    assert_equal(sharded.last["optimizer_states"], whole.last["optimizer_states"])
    model = AutoModelForCausalLM.from_pretrained(export(sharded)).state_dict()
    assert all(
        weight.equal(whole.weights[f"policy.model.{name}"]) for name, weight in model.items()
    )


def assert_equal(left, right) -> None:
    """Check that nested values are equal, tensors to the bit."""
    left, right = (dict(tree_flatten_with_path(value)[0]) for value in (left, right))
    assert left.keys() == right.keys()
    for path, value in left.items():
        other = right[path]
        assert value.equal(other) if isinstance(value, torch.Tensor) else value == other


@pytest.mark.soak
def test_a_job_with_sharded_checkpoints_is_resumed_exactly_and_with_another_strategy(job):
    reference, killed, other = job(), job(), job()
    settings = (
        "warm_start.checkpoint_every_n_steps=4",
        "callbacks.checkpoint.every_n_epochs=1",
        "trainer.max_epochs=2",
    )
    reference.run(*SHARDED, *settings)
    killed.kill_at("warm_start-6", *SHARDED, *settings, "ckpt_path=auto", rank=1)
    killed.kill_at("begin-1", *SHARDED, *settings, "ckpt_path=auto")
    shutil.copytree(killed.folder, other.folder)
    killed.run(*SHARDED, *settings, "ckpt_path=auto")
    assert killed.differs_from(reference) == []
    assert not list(killed.folder.glob("warm_start.ckpt*"))
    # one folder for each checkpoint
    files = list((killed.folder / "checkpoints").glob("*.ckpt"))
    assert len(list((killed.folder / "checkpoints").glob("*.shards"))) == len(files)
    other.run(*DDP, *settings, "ckpt_path=auto")
    for name, weight in other.weights.items():
        torch.testing.assert_close(weight, reference.weights[name], rtol=0, atol=1e-5)


@pytest.mark.soak
def test_a_ddp_job_continues_with_sharded_weights_and_is_exported(job):
    reference, continued = job(), job()
    settings = (
        "warm_start.enabled=false",
        "trainer.max_epochs=2",
        "callbacks.checkpoint.every_n_epochs=1",
    )
    reference.run(*DDP, *settings)
    continued.kill_at("begin-1", *DDP, *settings, "ckpt_path=auto")
    continued.run(*FSDP2, *settings, "ckpt_path=auto")
    expected = reference.weights
    assert continued.weights.keys() == expected.keys()
    for name, weight in continued.weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)
    assert continued.metrics.keys() == reference.metrics.keys()
    folder = export(continued)
    exported = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, weight in exported.items():
        assert weight.equal(continued.weights[f"policy.model.{name}"])


def export(job):
    """Return the Hugging Face folder of a run's last weights."""
    folder = job.folder.parent / "exported"
    arguments = [f"ckpt={job.folder / 'checkpoints' / 'last.ckpt'}", f"to={folder}"]
    code, output = run_module(
        "ragen_pl.export", arguments, folder=job.folder.parent, timeout=LIMIT_S
    )
    assert code == 0, output
    return folder


@pytest.mark.parametrize(("installed", "refused"), [("2.12.1+cu130", True), ("2.13.0", False)])
def test_an_older_torch_is_refused(monkeypatch, installed, refused):
    monkeypatch.setattr(strategy_rules, "version", lambda package: installed)
    cfg = OmegaConf.create({"trainer": {"strategy": "fsdp2", "devices": 2}})
    problems = list(strategy_rules.StrategyRules.config_problems(cfg, ranks=2))
    assert any("needs torch 2.13 and found 2.12.1" in line for line in problems) == refused


def test_a_strategy_is_named_or_a_class_with_arguments():
    settings = {"accelerator": "cpu", "devices": 2}
    named = build_trainer(settings | {"strategy": "fsdp2"}, logger=False).strategy
    assert isinstance(named, FSDP2Strategy) and named.num_processes == 2
    target = "lightning.pytorch.strategies.DDPStrategy"
    strategy = {"_target_": target, "find_unused_parameters": True}
    built = build_trainer(settings | {"strategy": strategy}, logger=False).strategy
    assert isinstance(built, DDPStrategy)
    assert built._ddp_kwargs == {"find_unused_parameters": True}
    assert build_trainer({"accelerator": "cpu"}, logger=False).strategy.root_device.type == "cpu"
