"""A run that begins from another run's weights."""

from __future__ import annotations

import filecmp

import pytest
import torch

STEADY = "learning_rate_end=1.0"  # so that a longer run has the same beginning


@pytest.fixture(scope="module")
def first(job):
    """A finished run which others begin from."""
    made = job()
    made.run(STEADY, "trainer.max_epochs=1")
    return made


@pytest.mark.slow
def test_from_its_warm_start_a_run_is_the_same_run(job, first):
    source = first.folder / "warm_start.pt"
    second = job()
    second.run(STEADY, f"warm_start.weights={source}", "trainer.max_epochs=1")
    assert not second.differs_from(first)
    assert filecmp.cmp(second.folder / "warm_start.pt", source, shallow=False)

    moved = source.rename(first.folder / "moved.pt")  # the run goes on without it
    second.run(STEADY, "trainer.max_epochs=2", "ckpt_path=last")
    moved.rename(source)
    whole = job()
    whole.run(STEADY, "trainer.max_epochs=2")
    assert not second.differs_from(whole)


@pytest.mark.slow
def test_from_a_checkpoint_and_without_its_critic(job, first):
    last = first.folder / "checkpoints" / "last.ckpt"
    second = job()
    second.run(
        f"warm_start.weights={last}", "algorithm=grpo", "rollout.groups=4", "rollout.group_size=2",
        "algorithm.loss.kl=null", "optimizer.lr=0", "trainer.max_epochs=1",
    )  # fmt: skip
    policy = {name: value for name, value in first.weights.items() if name.startswith("policy.")}
    assert second.weights.keys() == policy.keys()
    assert all(torch.equal(second.weights[name], value) for name, value in policy.items())
