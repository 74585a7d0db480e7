"""Small runs whose memory is planned."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs.composing import composed

from ragen_pl.models.build import build_small_lm

# large enough for the tensors to outweigh what the measurement itself allocates
TEXT = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3}
FEW = ("rollout.groups=16", "warm_start=none")
LOADED = ("model=pretrained", *FEW)
# a microbatch that is run once
ONE_PASS = ("rollout.groups=1", "rollout.group_size=4")
HALF = "model.build.dtype=bfloat16"


def on_cpu(*overrides: str):
    return composed("trainer.accelerator=cpu", *overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder with a small language model, whose weights can't be read."""
    path = tmp_path_factory.mktemp("model")
    build_small_lm(text=TEXT).save(path)
    return path
