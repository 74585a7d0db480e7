"""Presets for pretrained models run as they are, on tiny models of the same architecture."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from composing import composed

from ragen_pl.config import config_dir
from ragen_pl.memory.abstract import FakeKernels
from ragen_pl.memory.dry_run import abstract_agent
from ragen_pl.memory.plan import plan_memory
from ragen_pl.run.train import train
from tests.family_models import tiny

TEXT, IMAGES = "qwen2_5", "qwen2_5_vl"
# memory of the GPUs that each is for, in GB, and what its command adds
GPUS = {
    "gpu_24gb": (24,),
    "gpu_80gb": (80,),
    "gpus_8x80gb": (80, "model.size=7B"),
    "ragen_starpo": (80,),
    "ragen_starpo_s": (80,),
    "ragen_2026": (80,),
    "vagen_first": (80,),
    "vagen_2026": (80,),
}
PRESETS = {
    "gpu_24gb": ("frozenlake_visual", IMAGES),
    "gpu_80gb": ("frozenlake_visual", IMAGES),
    "gpus_8x80gb": ("frozenlake_visual", IMAGES),
    "ragen_starpo": ("sokoban", TEXT),
    "ragen_starpo_s": ("sokoban", TEXT),
    "ragen_2026": ("sokoban", TEXT),
    "vagen_first": ("sokoban_visual", IMAGES),
    "vagen_2026": ("sokoban_visual", IMAGES),
}
# what makes a run small, and fit on one CPU
SMALL = (
    "trainer.accelerator=cpu", "trainer.devices=1", "trainer.strategy=auto", "trainer.max_epochs=1",
    "rollout.groups=4", "rollout.max_response_tokens=8", "env.max_turns=2", "update.minibatches=2",
    "validation.episodes=2", "validation.baselines=null", "callbacks.progress=null", "logger=none",
)  # fmt: skip


def test_every_preset_for_pretrained_models_is_run():
    folder = config_dir() / "experiment"
    presets = [path.stem for path in folder.glob("*.yaml") if "defaults/" in path.read_text()]
    assert {*presets, "ragen_starpo_s", "vagen_2026"} == {*PRESETS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Hugging Face folders of tiny models."""
    saved = {name: tmp_path_factory.mktemp(name) for name in (TEXT, IMAGES)}
    for name, folder in saved.items():
        tiny(name).save(folder)
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_preset_fits_the_gpus_that_it_is_for(preset):
    (env, model), (gigabytes, *more) = PRESETS[preset], GPUS[preset]
    overrides = (f"env={env}", f"experiment={preset}", f"memory.device_gb={gigabytes}", *more)
    cfg = composed(*overrides)
    plan = plan_memory(cfg)
    # what an allocator's fragmentation may take
    assert plan.highest.total < 0.95 * plan.device.size
    images = plan.workload.images
    assert bool(images) == (model == IMAGES)
    if images:
        with FakeKernels():
            tokens = abstract_agent(cfg).policy.bundle.num_image_tokens(images[0])
        # several for each cell of the picture
        assert tokens == 100


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_preset_runs_an_iteration(preset, folders, tmp_path):
    env, model = PRESETS[preset]
    overrides = (f"env={env}", f"experiment={preset}", f"model.build.path={folders[model]}")
    cfg = composed(*overrides, *SMALL, f"paths.run_dir={tmp_path / 'run'}")
    cfg.rollout.group_size = min(2, cfg.rollout.group_size)
    metrics = train(cfg).metrics
    assert math.isfinite(metrics["update/loss"])
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()
