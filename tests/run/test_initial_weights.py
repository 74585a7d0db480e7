"""Runs that start from another run's weights."""

from __future__ import annotations

import filecmp
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from support.runs.composing import composed
from support.runs.small_runs import SMALL

from ragen_pl.loops.hooks import RolloutCallback
from ragen_pl.modules.warm_start import WarmStartModule
from ragen_pl.run.train import train

# the rate does not depend on the number of iterations
CONSTANT_RATE = "learning_rate_end=1.0"


class Flags(RolloutCallback):
    """Notes whether each phase of a run computes deterministically and looks for anomalies."""

    in_warm_start = True
    found: ClassVar[list[tuple[bool, bool]]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        anomalies = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        self.found.append((torch.are_deterministic_algorithms_enabled(), anomalies))


class Saved(RolloutCallback):
    """Notes the steps of the warm start's checkpoints."""

    in_warm_start = True
    steps: ClassVar[list[int]] = []

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if isinstance(pl_module, WarmStartModule):
            self.steps.append(trainer.global_step)


@pytest.fixture(scope="module")
def first(job):
    """A finished run that others start from."""
    run = job()
    run.run(CONSTANT_RATE, "trainer.max_epochs=2")
    return run


@pytest.mark.slow
def test_a_run_from_another_runs_warm_start_repeats_that_run(job, first):
    source = first.folder / "warm_start.pt"
    second = job()
    second.run(CONSTANT_RATE, f"warm_start.weights={source}", "trainer.max_epochs=1")
    assert filecmp.cmp(second.folder / "warm_start.pt", source, shallow=False)

    # the run is resumed without the source
    moved = source.rename(first.folder / "moved.pt")
    second.run(CONSTANT_RATE, "trainer.max_epochs=2", "ckpt_path=last")
    moved.rename(source)
    assert not second.differs_from(first)


@pytest.mark.slow
def test_a_run_without_a_critic_starts_from_a_checkpoint_with_one(job, first):
    last = first.folder / "checkpoints" / "last.ckpt"
    second = job()
    second.run(
        f"warm_start.weights={last}",
        "algorithm=grpo",
        "rollout.groups=4",
        "rollout.group_size=2",
        "algorithm.loss.kl=null",
        "optimizer.lr=0",
        "trainer.max_epochs=1",
    )
    policy = {name: value for name, value in first.weights.items() if name.startswith("policy.")}
    assert second.weights.keys() == policy.keys()
    assert all(torch.equal(second.weights[name], value) for name, value in policy.items())


@pytest.mark.slow
def test_a_frozen_encoder_is_that_of_the_warm_start_and_in_checkpoints(job):
    settings = (
        "env=frozenlake_visual",
        *SMALL[2:],
        CONSTANT_RATE,
        "update.freeze_vision=true",
        "validation.blank=false",
        "validation.baselines=null",
    )
    run, reference = job(), job()
    run.run("trainer.max_epochs=1", settings=settings)
    learned = torch.load(run.folder / "warm_start.pt")["module"]
    changed = {
        name for name, weight in learned.items() if not torch.equal(run.weights[name], weight)
    }
    encoder = {name for name in learned if ".vision." in name or ".projector." in name}
    assert encoder and changed == learned.keys() - encoder

    run.run("trainer.max_epochs=2", "ckpt_path=last", settings=settings)
    reference.run("trainer.max_epochs=2", settings=settings)
    assert not run.differs_from(reference)


@pytest.mark.slow
def test_the_warm_start_computes_with_the_flags_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(Flags, "found", [])
    flags = ("+trainer.deterministic=warn", "+trainer.detect_anomaly=true")
    seen = f"+callbacks.flags={{_target_: {__name__}.Flags}}"
    steps = ("warm_start.steps=1", "trainer.max_epochs=1")
    try:
        train(composed(*SMALL, *steps, *flags, seen, f"paths.root={tmp_path}"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert Flags.found == [(True, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("every", "steps"), [("null", []), ("2", [2, 4])])
def test_the_warm_start_writes_no_other_checkpoints_than_asked_for(
    tmp_path, monkeypatch, every, steps
):
    monkeypatch.setattr(Saved, "steps", [])
    seen = f"+callbacks.saved={{_target_: {__name__}.Saved}}"
    settings = (f"warm_start.checkpoint_every_n_steps={every}", "warm_start.steps=5")
    train(composed(*SMALL, *settings, "trainer.max_epochs=1", seen, f"paths.root={tmp_path}"))
    assert Saved.steps == steps
