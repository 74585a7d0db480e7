"""Runs that start from another run's weights."""

from __future__ import annotations

import filecmp

import pytest
import torch
from support.runs.small_runs import SMALL

# the rate does not depend on the number of iterations
CONSTANT_RATE = "learning_rate_end=1.0"


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
