"""Runs of on-policy distillation, with the checkpoint of another run as the teacher."""

from __future__ import annotations

import shutil

import pytest

KEY = "algorithm.loss.kl.reference.path"
STUDENT = (
    "algorithm=opd",
    "++model.build.text.hidden_size=16",
    "learning_rate_end=1.0",
    "validation.baselines=null",
)


@pytest.mark.slow
def test_a_run_learns_from_a_larger_run_and_is_resumed_with_it(job):
    teacher, whole, resumed = job(), job(), job()
    teacher.run("trainer.max_epochs=1", "validation.baselines=null")
    settings = (*STUDENT, f"{KEY}={teacher.folder}")
    whole.run(*settings, "trainer.max_epochs=2")
    assert whole.metrics["update/reference_kl"] > 0.01
    resumed.run(*settings, "trainer.max_epochs=1")
    assert not any(name.startswith("reference.") for name in resumed.weights)
    resumed.run(*settings, "trainer.max_epochs=2", "ckpt_path=last")
    assert resumed.differs_from(whole) == []

    # the student's own weights in the teacher's place
    last = teacher.folder / "checkpoints" / "last.ckpt"
    other = job()
    other.run("++model.build.seed=5", "trainer.max_epochs=1", "warm_start.enabled=false")
    shutil.copyfile(other.folder / "checkpoints" / "last.ckpt", last)
    output = resumed.run(*settings, "trainer.max_epochs=3", "ckpt_path=last", codes=(2,))
    assert "the reference's frozen weights are not those of the checkpoint" in output
    shutil.rmtree(teacher.folder)
    output = resumed.run(*settings, "trainer.max_epochs=3", "ckpt_path=last", codes=(2,))
    assert f"{KEY}={teacher.folder}: there is no such file or folder" in output
    assert "building the model" not in output


@pytest.mark.slow
def test_a_sharded_run_learns_as_one_of_copies_does(job):
    teacher, copies, sharded = job(), job(), job()
    teacher.run("trainer.max_epochs=1", "warm_start.enabled=false")
    settings = (*STUDENT, f"{KEY}={teacher.folder}", "trainer.devices=2", "trainer.max_epochs=1")
    copies.run(*settings, "warm_start.enabled=false")
    sharded.run(*settings, "warm_start.enabled=false", "trainer.strategy=fsdp2")
    assert sharded.metrics["update/reference_kl"] == pytest.approx(
        copies.metrics["update/reference_kl"], rel=1e-3
    )
    assert sharded.weights.keys() == copies.weights.keys()
