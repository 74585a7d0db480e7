"""Contents of last.ckpt and metrics.json at the end of a run."""

from __future__ import annotations

import json

import pytest
import torch


@pytest.mark.slow
def test_the_last_iteration_is_saved_at_any_interval(job):
    every, odd = job(), job()
    every.run("callbacks.checkpoint.every_n_epochs=1", "warm_start.steps=2")
    # of three iterations
    odd.run("callbacks.checkpoint.every_n_epochs=2", "warm_start.steps=2")
    assert not odd.differs_from(every)
    last = odd.folder / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=False)["epoch"] == 2

    before = json.loads((odd.folder / "metrics.json").read_text())
    odd.run("callbacks.checkpoint.every_n_epochs=2", "warm_start.steps=2", "ckpt_path=last")
    after = json.loads((odd.folder / "metrics.json").read_text())
    # the second command found a finished run
    assert before.keys() == after.keys()
    assert after["val/success"] == before["val/success"]
    assert after["update/loss"] == before["update/loss"]
    assert [file.name for file in last.parent.glob("last*")] == ["last.ckpt"]
