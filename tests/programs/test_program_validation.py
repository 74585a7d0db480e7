"""What a run of programs has by default: no scripted policies beside it, and a learning rate for few episodes."""

from __future__ import annotations

import json
import math

import pytest
from support.runs.composing import composed
from support.runs.module_process import run_module

from ragen_pl.config import config_dir

COMMAND = ("env=program", "env.command=[a]")
SMALL = sorted(file.stem for file in (config_dir() / "model").glob("small_*.yaml"))

PROGRAM = """
import os, uuid
open(os.path.join(os.environ["NOTES"], str(uuid.uuid4())), "w").close()
ask("a")
report(reward=1)
"""


def test_without_validation_no_program_is_started_for_scripted_policies(script, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    command = script(PROGRAM)
    overrides = (
        "env=program", f"env.command={json.dumps(command)}", f"env.kwargs.variables.NOTES={notes}",
        "++model.build.text.hidden_size=32", "++model.build.text.intermediate_size=64",
        "++model.build.text.num_attention_heads=2", "rollout.groups=2", "rollout.max_response_tokens=4",
        "validation/baselines=random", "validation.episodes=3", "trainer.limit_val_batches=0",
        "trainer.max_epochs=1", "logger=none", "callbacks.progress=null", "callbacks.trajectories=null",
        "paths.run_dir=run",
    )  # fmt: skip
    code, output = run_module("ragen_pl.fit", overrides, folder=tmp_path, timeout=600)
    assert code == 0, output[-3000:]
    # the check of the environment, and an iteration
    assert len([*notes.iterdir()]) == 1 + 2


def test_scripted_policies_play_no_program_unless_asked_for():
    assert not composed(*COMMAND).validation.baselines
    asked_for = composed(*COMMAND, "validation/baselines=random").validation.baselines
    assert "random" in asked_for


def rate(*overrides):
    return composed(*COMMAND, *overrides, checked=False).optimizer.lr


@pytest.mark.parametrize("model", SMALL)
def test_the_learning_rate_of_programs_is_one_for_few_episodes(model):
    """That of an iteration of a hundred episodes, scaled."""
    many = rate(f"model={model}", "learning_rate=default")
    assert rate(f"model={model}") == pytest.approx(many * math.sqrt(4 / 128), rel=0.1)


def test_other_rates_of_programs_are_kept():
    """Those of the command line, and that of a pretrained model, which is far lower."""
    assert rate() == rate("model=small_lm")
    assert rate("model=small_vlm", "optimizer.lr=3e-3") == 3e-3
    assert rate("model=qwen3") == rate("model=qwen3", "learning_rate=default") == 1e-6
