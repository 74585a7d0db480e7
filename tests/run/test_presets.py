"""Presets for pretrained models run as they are, on tiny models of the same architecture."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.models.family_models import tiny
from support.runs.composing import composed

from ragen_pl.config import config_dir
from ragen_pl.memory.dry_run import abstract_agent
from ragen_pl.memory.plan import plan_memory
from ragen_pl.memory.workload import workload_of
from ragen_pl.run.train import train

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
# share of the layers that is planned: less than the whole where the GPU has room
SHARES = {
    "gpus_8x80gb": 2,
    "ragen_2026": 2,
    "ragen_starpo": 4,
    "ragen_starpo_s": 4,
    "vagen_first": 4,
    "vagen_2026": 4,
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
    "memory.check=false",
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


def planned(preset, *, share=1):
    """Return a preset's config for a share of a model's layers on a share of a GPU."""
    (env, _), (gigabytes, *more) = PRESETS[preset], GPUS[preset]
    overrides = (f"env={env}", f"experiment={preset}", f"memory.device_gb={gigabytes / share}")
    cfg = composed(*overrides, *more)
    for sizes in (cfg.model.config, cfg.model.sizes[cfg.model.size]):
        for key in ("num_hidden_layers", "text_config.num_hidden_layers", "vision_config.depth"):
            if (layers := OmegaConf.select(sizes, key)) is not None:
                OmegaConf.update(sizes, key, layers // share)
    return cfg


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_preset_fits_the_gpus_that_it_is_for(preset):
    """A share of the layers fits into that share of the memory, then all fit: the rest of the model counts more."""
    check_fits(preset, share=SHARES.get(preset, 1))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("preset", SHARES)
def test_preset_fits_with_all_layers(preset):
    check_fits(preset, share=1)


def check_fits(preset, *, share):
    plan = plan_memory(planned(preset, share=share))
    # what an allocator's fragmentation may take
    assert plan.highest.total < 0.95 * plan.device.size
    assert bool(plan.workload.images) == (PRESETS[preset][1] == IMAGES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", [name for name, (_, model) in PRESETS.items() if model == IMAGES]
)
def test_pictures_have_several_tokens_for_each_cell(preset):
    cfg = planned(preset, share=16)
    bundle = abstract_agent(cfg).policy.bundle
    (image, *_) = workload_of(cfg, bundle).images
    assert bundle.num_image_tokens(image) == 100


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
