"""What last.ckpt and metrics.json hold at a run's end."""

from __future__ import annotations

import json

import pytest
import torch


@pytest.mark.slow
def test_the_last_iteration_is_kept_whatever_the_interval(job):
    every, odd = job(), job()
    every.run("callbacks.checkpoint.every_n_epochs=1", "warm_start.steps=2")
    odd.run("callbacks.checkpoint.every_n_epochs=2", "warm_start.steps=2")  # of three iterations
    assert not odd.differs_from(every)
    last = odd.folder / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=False)["epoch"] == 2

    before = json.loads((odd.folder / "metrics.json").read_text())
    odd.run("callbacks.checkpoint.every_n_epochs=2", "warm_start.steps=2", "ckpt_path=last")
    after = json.loads((odd.folder / "metrics.json").read_text())
    assert before.keys() == after.keys()  # of a run that was finished before
    assert after["val/success"] == before["val/success"]
    assert after["update/loss"] == before["update/loss"]
    assert [file.name for file in last.parent.glob("last*")] == ["last.ckpt"]
