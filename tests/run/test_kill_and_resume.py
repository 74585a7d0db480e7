"""Jobs that are killed or stopped in any phase and resumed end bit-identical."""

from __future__ import annotations

import pytest
import torch

EVERY_ITERATION = ("callbacks.checkpoint.every_n_epochs=1",)
EVERY_STEP = (
    "callbacks.checkpoint.every_n_epochs=null",
    "+callbacks.checkpoint.every_n_train_steps=1",
    "callbacks.checkpoint.save_on_train_epoch_end=false",
)
# nothing but signals and the end of the run saves
NEVER = ("callbacks.checkpoint.every_n_epochs=100", "warm_start.checkpoint_every_n_steps=null")
# of a validation's 16 episodes
TWO_BATCHES = ("rollout.num_envs=8",)
TWO_RANKS = ("trainer.devices=2", "trainer.strategy=ddp")


@pytest.fixture(scope="module")
def reference(job):
    """A job that is neither killed nor stopped; how often it saves changes neither weights nor metrics."""
    run = job()
    run.run()
    return run


# An iteration is eight optimizer steps. There is no `trained-8`: the minibatches end there.
@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpoints, moments",
    [
        pytest.param(EVERY_ITERATION, ["rollout-1-3", "step-10"], id="rollout and update"),
        pytest.param(
            EVERY_ITERATION,
            ["begin-1", "rollout-1-3", "step-10", "validation-1", "begin-2"],
            id="every iteration",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            EVERY_STEP,
            ["trained-1", "step-7", "validation-0", "rollout-1-3", "validation-2"],
            id="every step",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_killed_job_ends_bit_identical(job, reference, checkpoints, moments):
    killed = job()
    # one command starts the run and continues it
    killed.kill_at("warm_start-6", *checkpoints, "ckpt_path=auto")
    assert not (killed.folder / "warm_start.pt").exists()
    for moment in moments:
        killed.kill_at(moment, *checkpoints, "ckpt_path=auto")
    killed.run(*checkpoints, "ckpt_path=auto")
    assert killed.differs_from(reference) == []


@pytest.mark.soak
def test_a_job_of_two_ranks_killed_on_either_ends_bit_identical(job):
    reference, killed = job(), job()
    settings = (*EVERY_STEP, *TWO_RANKS)
    reference.run(*settings)
    killed.kill_at("warm_start-6", *settings, rank=1)
    killed.kill_at("step-3", *settings, "ckpt_path=last", rank=0)
    killed.kill_at("validation-1", *settings, "ckpt_path=last", rank=1)
    killed.run(*settings, "ckpt_path=last")
    assert killed.differs_from(reference) == []


@pytest.mark.slow
def test_a_warm_start_killed_in_its_middle_is_resumed_exactly(job):
    settings = (
        "warm_start.checkpoint_every_n_steps=4",
        "++model.build.text.attention_dropout=0.1",
        "trainer.max_epochs=1",
    )
    reference, killed = job(), job()
    reference.run(*settings)
    killed.kill_at("warm_start-10", *settings)
    assert (killed.folder / "warm_start.ckpt").exists()
    # a warm start from its beginning would take step 7 again
    killed.kill_at("warm_start-11", *settings, "ckpt_path=last")
    killed.run(*settings, *never_reached("warm_start-7"), "ckpt_path=last")
    assert not (killed.folder / "warm_start.ckpt").exists()
    weights, expected = (
        torch.load(run.folder / "warm_start.pt", weights_only=True) for run in (killed, reference)
    )
    assert weights["demonstrations"] == expected["demonstrations"]
    assert weights["module"].keys() == expected["module"].keys()
    assert all(value.equal(expected["module"][name]) for name, value in weights["module"].items())
    assert killed.differs_from(reference) == []


@pytest.mark.slow
def test_a_warm_start_begins_anew_where_its_checkpoint_has_changed(job):
    settings = (
        "warm_start.checkpoint_every_n_steps=1",
        "warm_start.steps=3",
        "warm_start.episodes=8",
    )
    begun = job()
    begun.kill_at("warm_start-2", *settings)
    file = begun.folder / "warm_start.ckpt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    output = begun.stop_at("warm_start-0", *settings, "ckpt_path=last")
    assert f"{file} is damaged: " in output
    assert " has changed since it was written; the warm start begins anew" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "moments",
    [
        pytest.param({"step-10": 11, "validating-2-0": 24}, id="update and validation"),
        pytest.param(
            {"rollout-0-3": 0, "step-10": 11, "validation-1": 16, "rollout-2-3": 16, "validating-2-0": 24},
            id="every phase",
            marks=pytest.mark.soak,
        ),
    ],
)  # fmt: skip
def test_a_job_stopped_by_sigterm_loses_at_most_the_phase_it_was_in(job, reference, moments):
    stopped = job()
    stopped.stop_at("warm_start-6", *NEVER, "ckpt_path=auto")
    assert (stopped.folder / "warm_start.ckpt").exists()
    for moment, steps in moments.items():
        batches = TWO_BATCHES if moment.startswith("validating") else ()
        settings = (*NEVER, *never_reached("warm_start-6"), *batches)
        message = stopped.stop_at(moment, *settings, "ckpt_path=auto")
        assert "ragen_pl: stopped by SIGTERM; the last checkpoint is" in message
        assert stopped.steps == steps
    stopped.run(*NEVER, *never_reached("step-15"), "ckpt_path=auto")
    assert stopped.differs_from(reference) == []


@pytest.mark.soak
def test_ranks_agree_where_to_stop(job):
    reference, stopped = job(), job()
    settings = (*NEVER, *TWO_RANKS)
    reference.run(*settings)
    stopped.stop_at("rollout-1-2", *settings, "ckpt_path=auto", rank=0)
    assert stopped.steps == 8
    stopped.stop_at("step-12", *settings, "ckpt_path=auto", rank=1)
    assert stopped.steps == 13
    stopped.stop_at("validating-1-0", *settings, "rollout.num_envs=4", "ckpt_path=auto", rank=1)
    assert stopped.steps == 16
    stopped.run(*settings, "ckpt_path=auto")
    assert stopped.differs_from(reference) == []


def never_reached(moment: str) -> list[str]:
    """Return overrides that kill the run if it passes a moment that it has behind it."""
    return [
        "+callbacks.passed._target_=support.runs.killing.KillAt",
        f"+callbacks.passed.moment={moment}",
    ]
