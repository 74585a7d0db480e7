"""A slow or paid program is started for what a run needs, and for no scripted policy beside it."""

from __future__ import annotations

import json

from support.runs.module_process import run_module

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
