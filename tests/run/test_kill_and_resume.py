"""Jobs killed with SIGKILL again and again and resumed with `ckpt_path=last` end bit-identical."""

from __future__ import annotations

import pytest

EVERY_ITERATION = ("callbacks.checkpoint.every_n_epochs=1",)
EVERY_STEP = (
    "callbacks.checkpoint.every_n_epochs=null",
    "+callbacks.checkpoint.every_n_train_steps=1",
    "callbacks.checkpoint.save_on_train_epoch_end=false",
)
TWO_RANKS = ("trainer.devices=2", "trainer.strategy=ddp")


# An iteration is eight optimizer steps; `trained-8` is unknown to it, for its minibatches end there.
@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoints, moments",
    [
        (EVERY_ITERATION, ["begin-1", "rollout-1-3", "step-10", "validation-1", "begin-2"]),
        (EVERY_STEP, ["trained-1", "step-7", "validation-0", "rollout-1-3", "validation-2"]),
    ],
    ids=["every iteration", "every step"],
)
def test_a_job_killed_in_every_phase(job, checkpoints, moments):
    whole, killed = job(), job()
    whole.run(*checkpoints)
    killed.kill_at("warm_start-30", *checkpoints)
    assert not (killed.folder / "warm_start.pt").exists()
    for moment in moments:
        killed.kill_at(moment, *checkpoints, "ckpt_path=last")
    killed.run(*checkpoints, "ckpt_path=last")
    assert killed.differs_from(whole) == []


@pytest.mark.slow
def test_a_job_of_two_ranks_killed_on_either(job):
    whole, killed = job(), job()
    settings = (*EVERY_STEP, *TWO_RANKS)
    whole.run(*settings)
    killed.kill_at("warm_start-30", *settings, rank=1)
    killed.kill_at("step-3", *settings, "ckpt_path=last", rank=0)
    killed.kill_at("validation-1", *settings, "ckpt_path=last", rank=1)
    killed.run(*settings, "ckpt_path=last")
    assert killed.differs_from(whole) == []
