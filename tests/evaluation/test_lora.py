"""A run that trains LoRA adapters on a saved model, with a KL penalty towards that model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.runs.composing import composed, evaluation_config
from transformers import AutoModelForCausalLM

from ragen_pl.config import ConfigError
from ragen_pl.evaluation.evaluator import evaluate
from ragen_pl.evaluation.exporting import export
from ragen_pl.models.build import build_small_lm
from ragen_pl.run.train import train

pytestmark = pytest.mark.slow
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}
SMALL = (
    "env=frozenlake", "env.invalid_ends=false", "env.max_turns=3", "curriculum=null", "model=pretrained",
    "model.build.lora={r: 8, lora_alpha: 16}", "rollout.groups=4", "rollout.max_response_tokens=16",
    "validation.episodes=6", "validation.baselines=null",
    "optimizer.lr=2e-3", "warm_start.steps=40", "warm_start.episodes=64", "warm_start.optimizer.lr=2e-2",
    "trainer.max_epochs=2", "update.epochs=1", "callbacks.progress=null", "callbacks.trajectories=null", "logger=none",
)  # fmt: skip


def test_adapters_are_trained_evaluated_and_merged_in_an_export(tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    build_small_lm(text=TINY).save(base)
    cfg = composed(*SMALL, f"model.build.path={base}", f"paths.run_dir={run}")
    metrics = train(cfg).metrics
    assert metrics["update/reference_kl"] > 1e-3

    checkpoint = run / "checkpoints" / "last.ckpt"
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert all("lora_" in name or name.startswith("critic.") for name in state)
    assert set(torch.load(run / "warm_start.pt", weights_only=True)["module"]) == set(state)
    base_model = (base / "model.safetensors").stat().st_size
    assert (run / "warm_start.pt").stat().st_size < 0.6 * base_model

    folder = export(
        evaluation_config(f"ckpt={run}", f"to={tmp_path / 'exported'}", command="export")
    )
    assert not list(folder.glob("adapter*"))
    quiet = ("mlflow=false", "trajectories=false", "validation.baselines=null")
    results = [
        evaluate(evaluation_config(f"ckpt={ckpt}", *quiet)).validation_sets["held_out"]["policies"][
            "policy"
        ]
        for ckpt in (run, folder)
    ]
    assert results[0] == results[1]

    adapters = export(
        evaluation_config(
            f"ckpt={run}", f"to={tmp_path / 'adapters'}", "adapters=true", command="export"
        )
    )
    assert {file.name for file in adapters.glob("*.safetensors")} == {"adapter_model.safetensors"}
    ids = torch.arange(8, 24).view(1, 16)
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(folder)(input_ids=ids).logits
        plain = AutoModelForCausalLM.from_pretrained(base)
        before = plain(input_ids=ids).logits
        plain.load_adapter(str(adapters))
        adapted = plain(input_ids=ids).logits
    assert not torch.allclose(before, merged, atol=1e-2)
    torch.testing.assert_close(adapted, merged, atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match=r"adapters=true: the policy has no adapters"):
        export(
            evaluation_config(
                f"ckpt={folder}", f"to={tmp_path / 'none'}", "adapters=true", command="export"
            )
        )

    # another model in the place of the base
    build_small_lm(text=TINY, seed=9).save(base)
    with pytest.raises(ConfigError, match=r"the policy's frozen weights .* model\.build\.path"):
        evaluate(evaluation_config(f"ckpt={run}", *quiet))
