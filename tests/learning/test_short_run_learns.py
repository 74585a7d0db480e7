"""The main job, cut short: a warm start that sees, and RL that improves on it."""

import json

import pytest
from support.runs.module_process import run_module


@pytest.mark.slow
def test_six_iterations_double_the_success_of_the_warm_start(tmp_path):
    overrides = [
        "env=frozenlake_visual",
        "trainer.max_epochs=6",
        "trainer.check_val_every_n_epoch=6",
        "validation.episodes=128",
        "validation/baselines=random",
        "logger=csv",
        "callbacks.progress=null",
        "callbacks.plots=null",
        "callbacks.trajectories=null",
        f"paths.root={tmp_path}",
    ]
    code, output = run_module("ragen_pl.fit", overrides, folder=tmp_path, timeout=7200)
    assert code == 0, output[-3000:]
    (run,) = (tmp_path / "frozenlake_visual").iterdir()
    metrics = json.loads((run / "metrics.json").read_text())
    after, before = metrics["val/success"], _first_success(run)
    print(f"success before {before:.3f}, after {after:.3f}")
    assert metrics["random_policy/success"] < 0.3
    assert before < 0.35
    assert after > before + 0.25
    assert metrics["blank_images/success"] < metrics["random_policy/success"] + 0.1
    assert metrics["val/think_accuracy"] > 0.9
    assert metrics["rollout/logprob_mismatch_max"] < 1e-3


def _first_success(run):
    lines = (run / "csv" / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("val/success")
    return float(next(cell for line in lines[1:] if (cell := line.split(",")[column])))
