"""A run of two ranks whose model overflows: it ends with a record, which one process repeats."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from support.runs.module_process import run_module

from ragen_pl.config import ConfigError
from ragen_pl.data.recorded_step import RecordedStep
from ragen_pl.replaying.step import build_module, read_batch, replay

LAYER = "policy.model.model.layers.1.mlp.up_proj"
ROOT = Path(__file__).parents[2]
SETTINGS = {"batch": None, "dtype": None, "device": "cpu", "trust": False}


def settings(**changes):
    return OmegaConf.create({**SETTINGS, "paths": {"run_dir": None}, **changes})


@pytest.fixture(scope="module")
def ended(job):
    """A run of two ranks that ended since its model overflows from the fourth step on, and its output."""
    run = job()
    output = run.run(
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "warm_start.enabled=false",
        "model.build.text.num_hidden_layers=3",
        "update.tokens_per_microbatch=100",
        "rollout.top_p=0.9",
        "validation.blank=false",
        "callbacks.checkpoint.every_n_epochs=1",
        "callbacks.collapse=null",
        "callbacks.diagnostics=null",
        "callbacks.record_batches.every_n_iterations=2",
        "+callbacks.overflow._target_=support.runs.overflow.Overflow",
        f"+callbacks.overflow.layer={LAYER}",
        "+callbacks.overflow.step=11",
        codes=(1, 2),
    )
    return run.folder, output


@pytest.mark.slow
def test_a_run_that_overflows_ends_with_one_line_and_a_record(ended):
    folder, output = ended
    (line,) = [
        line for line in output.splitlines() if "gradients or losses are not finite" in line
    ] or [output]
    assert line.startswith("ragen_pl: iteration 2, optimizer step 14: ")
    assert f"on ranks 0, 1, first at the output of {LAYER} on rank 0 in minibatch 1 of " in line
    record = folder / "bad_batch" / "0002_00014_0.pt"
    assert f"; repeat it with: python -m ragen_pl.replay batch={record}; " in line
    assert f"; the last checkpoint is {folder}/checkpoints/last.ckpt; resume with: " in line
    assert output.count("gradients or losses are not finite") == 1
    names = {file.name for file in (folder / "bad_batch").iterdir()}
    assert names == {f"0002_00014_{part}.pt" for part in (0, 1, "weights")}
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == 8
    assert all(weight.isfinite().all() for weight in state["state_dict"].values())


@pytest.mark.slow
def test_one_process_repeats_a_ranks_step_and_names_the_layer(ended, tmp_path):
    folder, _ = ended
    record = folder / "bad_batch" / "0002_00014_1.pt"
    arguments = [str(record), "dtype=bfloat16", "device=cpu"]
    code, output = run_module(
        "ragen_pl.replay", arguments, folder=tmp_path, paths=(ROOT,), timeout=600
    )
    assert code == 0, output
    lines = output.splitlines()
    assert lines[0] == "iteration 2, optimizer step 14"
    assert lines[1].startswith("rank 1 of 2: loss of each minibatch nan")
    for title in ("as in the run", "bfloat16"):
        assert f"{title}: the first not finite is the output of {LAYER}" in lines
    (row,) = [line for line in lines if f" {LAYER} " in line]
    assert row.split("│")[2].strip() in ("inf", "nan")
    # a layer before it
    (row,) = [line for line in lines if " policy.model.model.layers.0.mlp.up_proj " in line]
    assert 0 < float(row.split("│")[2]) < 1e6


@pytest.mark.slow
def test_the_settings_are_those_of_the_start_that_wrote_the_weights(ended, tmp_path):
    """Not those of a later start."""
    shutil.copytree(ended[0], tmp_path / "run")
    folder = tmp_path / "run"
    later, (weights,) = folder / "config_2.yaml", folder.glob("batches/0001_*_weights.pt")
    saved = torch.load(weights, weights_only=True)
    torch.save(saved | {"settings": "config_2.yaml"}, weights)
    record = "batches/0001_00001_0.pt"
    batch = settings(batch=str(folder / record), trust=True)
    with pytest.raises(ConfigError, match=r"config_2\.yaml cannot be read"):
        replay(batch)
    shutil.copy(folder / "config.yaml", later)
    assert read_batch(batch).settings == later
    original = read_batch(settings(batch=str(ended[0] / record)))
    assert original.settings == ended[0] / "config.yaml"
    # of an earlier version: those of the last start; and no file elsewhere
    for name in (None, "../config.yaml", 2):
        torch.save(saved | {"settings": name}, weights)
        assert read_batch(batch).settings == later


@pytest.mark.slow
def test_what_cannot_be_repeated_is_refused_in_one_line(ended, tmp_path):
    folder, _ = ended
    record = folder / "batches" / "0001_00001_0.pt"
    (tmp_path / "other.pt").write_bytes(record.read_bytes())
    torch.save({"samples": 1}, tmp_path / "strange.pt")
    refused = {
        r"batch has no value; set batch=FILE": {},
        r"no run's config\.yaml next to it; set paths\.run_dir": {
            "batch": str(tmp_path / "other.pt")
        },
        r"expected the file of a recorded step": {"batch": str(tmp_path / "strange.pt")},
    }
    for message, given in refused.items():
        with pytest.raises(ConfigError, match=message) as caught:
            replay(settings(**given))
        assert "\n" not in str(caught.value)
    # a run of somebody else names code
    shutil.copytree(folder, tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.yaml"
    theirs = settings(batch=str(tmp_path / "theirs" / "batches" / record.name))
    text = file.read_text()
    file.write_text(text + "\n")
    assert replay(theirs) is None
    file.write_text(text.replace("torch.optim.AdamW", "subprocess.getoutput"))
    with pytest.raises(ConfigError, match=r"optimizer\._target_=subprocess.* set trust=true"):
        replay(theirs)
    recorded = read_batch(settings(batch=str(record)))
    other = OmegaConf.load(folder / "config.yaml")
    other.model.build.text.hidden_size = 64
    with pytest.raises(ConfigError, match="holds another model"):
        build_module(other, recorded, dtype=None, device=torch.device("cpu"))
    assert torch.__version__.startswith(RecordedStep.read(record).versions["torch"])
