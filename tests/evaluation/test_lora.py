"""A run that trains LoRA adapters on a saved model, with a KL penalty towards that model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from ragen_pl.config import check_config, config_dir
from ragen_pl.evaluation.evaluator import evaluate
from ragen_pl.evaluation.exporting import export
from ragen_pl.evaluation.settings import resolve_settings
from ragen_pl.models.build import build_small_lm, load_pretrained
from ragen_pl.run.train import train

pytestmark = pytest.mark.slow
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
REFERENCE = "algorithm.loss.kl.reference._target_=ragen_pl.modules.reference.AdaptersOff"
SMALL = (
    "env=frozenlake", "env.invalid_ends=false", "env.max_turns=3", "curriculum=null", "model=pretrained",
    "model.build.lora={r: 8, lora_alpha: 16}", REFERENCE, "rollout.groups=8", "validation.episodes=12",
    "warm_start.steps=40", "warm_start.episodes=64", "warm_start.optimizer.lr=2e-2", "trainer.max_epochs=2",
    "update.epochs=1", "callbacks.progress=null", "callbacks.trajectories=null", "logger=none",
)  # fmt: skip


def composed(command: str, *arguments: str) -> DictConfig:
    overrides = resolve_settings(get_args_parser().parse_args(list(arguments)))
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        return compose(command, overrides=overrides)


def test_adapters_are_trained_evaluated_and_merged_in_an_export(tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    build_small_lm(text=TINY).save(base)
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        cfg = compose("fit", overrides=[*SMALL, f"model.build.path={base}", f"paths.run_dir={run}"])
    check_config(cfg)
    metrics = train(cfg)
    assert metrics["update/reference_kl"] > 0.01

    state = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert not any(name.startswith("reference.") for name in state)
    loaded = load_pretrained(str(base)).model.state_dict()
    under = {
        name.removeprefix("policy.model.").replace(".base_layer", ""): value
        for name, value in state.items()
        if name.startswith("policy.model.") and "lora_" not in name
    }
    assert under.keys() == loaded.keys()
    assert all(torch.equal(under[name], value) for name, value in loaded.items())

    folder = export(composed("export", f"ckpt={run}", f"to={tmp_path / 'exported'}"))
    assert not list(folder.glob("adapter*"))
    quiet = ("mlflow=false", "trajectories=false", "validation.baselines=null")
    results = [
        evaluate(composed("evaluate", f"ckpt={ckpt}", *quiet)).validation_sets["held_out"][
            "policies"
        ]["policy"]
        for ckpt in (run, folder)
    ]
    assert results[0] == results[1]
