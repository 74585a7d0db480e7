"""A run of two ranks whose model overflows: it ends with a record, which one process repeats."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from support.runs.module_process import run_module

from ragen_pl.config import ConfigError
from ragen_pl.data.batch import Minibatch, Samples
from ragen_pl.data.recorded_step import RecordedStep
from ragen_pl.replaying.step import build_module, read_batch, read_checkpointed, replay

LAYER = "policy.model.model.layers.1.mlp.up_proj"
ROOT = Path(__file__).parents[2]
SETTINGS = {"batch": None, "ckpt": None, "dtype": None, "device": "cpu", "trust": False}


def settings(**changes):
    return OmegaConf.create({**SETTINGS, "paths": {"root": "runs", "run_dir": None}, **changes})


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
        "+callbacks.inside._target_=support.runs.overflow.SaveAtStep",
        "+callbacks.inside.step=0",
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


def same(first: Minibatch, second: Minibatch) -> bool:
    """Whether two minibatches are equal bit for bit."""
    tensors = [
        (getattr(first.samples, field.name), getattr(second.samples, field.name))
        for field in fields(Samples)
    ]
    tensors += zip(first.images, second.images, strict=True)
    tensors += zip(first.microbatches, second.microbatches, strict=True)
    for name in ("loss_tokens", "value_tokens", "kl_tokens", "sequences", "episodes", "reference"):
        tensors.append((getattr(first, name), getattr(second, name)))
    assert first.kept_ids is not None and second.kept_ids is not None
    tensors += [
        (first.kept_ids.ids, second.kept_ids.ids),
        (first.kept_ids.ends, second.kept_ids.ends),
    ]
    return all(map(torch.equal, *zip(*tensors, strict=True))) and (
        (first.ends_step, first.scale) == (second.ends_step, second.scale)
    )


@pytest.mark.slow
def test_a_checkpoint_inside_an_update_holds_the_step_of_each_rank(ended, capsys):
    """The step that was recorded when it began."""
    folder, _ = ended
    checkpointed = read_checkpointed(settings(ckpt=str(folder / "checkpoints" / "inside.ckpt")))
    assert len(checkpointed.steps) == 2
    for rank, step in enumerate(checkpointed.steps):
        recorded = read_batch(settings(batch=str(folder / "batches" / f"0001_00001_{rank}.pt")))
        (expected,) = recorded.steps
        assert (step.rank, step.step, step.iteration) == (rank, expected.step, expected.iteration)
        assert len(step.minibatches) == len(expected.minibatches) > 1
        assert all(map(same, step.minibatches, expected.minibatches))
        for name, weight in recorded.weights.items():
            assert weight.equal(checkpointed.weights[name])
    assert replay(settings(ckpt=str(folder / "checkpoints" / "inside.ckpt"))) is None
    printed = capsys.readouterr().out
    assert "rank 0 of 2: loss" in printed and "rank 1 of 2: loss" in printed
    assert "as in the run: all numbers are finite" in printed


@pytest.mark.slow
def test_the_settings_are_those_of_the_start_that_wrote_the_weights(ended, tmp_path):
    """Not those of a later start."""
    shutil.copytree(ended[0], tmp_path / "run")
    folder = tmp_path / "run"
    later, checkpoint = folder / "config_2.yaml", folder / "checkpoints" / "inside.ckpt"
    for file in folder.glob("batches/0001_*_weights.pt"):
        for path in (file, checkpoint):
            saved = torch.load(path, weights_only=True)
            torch.save(saved | {"settings": "config_2.yaml"}, path)
    given = settings(ckpt=str(checkpoint), trust=True)
    batch = settings(batch=str(folder / "batches" / "0001_00001_0.pt"), trust=True)
    with pytest.raises(ConfigError, match=r"config_2\.yaml cannot be read"):
        replay(given)
    changed = OmegaConf.load(folder / "config.yaml")
    changed["update"].minibatches *= 2
    OmegaConf.save(changed, later)
    assert read_batch(batch).settings == read_checkpointed(given).settings == later
    original = read_checkpointed(settings(ckpt=str(ended[0] / "checkpoints" / "inside.ckpt")))
    assert original.settings == ended[0] / "config.yaml"
    rows = [
        sum(len(minibatch.samples.input_ids) for minibatch in recorded.steps[0].minibatches)
        for recorded in (original, read_checkpointed(given))
    ]
    assert rows[0] > rows[1]
    # of an earlier version: those of the last start; and no file elsewhere
    for name in (None, "../config.yaml", 2):
        torch.save({**torch.load(checkpoint, weights_only=True), "settings": name}, checkpoint)
        assert read_checkpointed(given).settings == later


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
        r"the checkpoint holds no samples": {"ckpt": str(folder / "checkpoints" / "last.ckpt")},
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
