"""A recorded step without minibatches, for what refuses a run's folder before it reads any."""

from __future__ import annotations

from pathlib import Path

import torch

from ragen_pl.data.recorded_step import RecordedStep


def empty_step() -> RecordedStep:
    """Return the first step of an update."""
    return RecordedStep(
        phase="update", iteration=1, step=1, rank=0, ranks=1, minibatches=[], random=[], suspect=None,
        weights="weights.pt", versions={},
    )  # fmt: skip


def recorded(run: Path) -> str:
    """Write a step into a run, and return what `replay` is given."""
    file = run / "batches" / "0001_00001_0.pt"
    file.parent.mkdir(exist_ok=True)
    empty_step().write(file)
    torch.save({"module": {}, "settings": "config.yaml"}, file.with_name("weights.pt"))
    return f"batch={file}"
