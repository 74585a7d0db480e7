"""Weights under the names of checkpoints, adapters merged."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from support.models.family_models import tiny

from ragen_pl.models.adapters import add_lora, merge_adapters
from ragen_pl.models.checkpoint_weights import checkpoint_weights


def saved(model, folder) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == expected.keys() and all(
        torch.equal(weight, expected[name]) for name, weight in weights.items()
    )


@pytest.mark.parametrize("name", ["llama3_2", "gemma3", "qwen2_5_vl", "internvl"])
def test_they_are_those_of_a_saved_model(name, tmp_path):
    model = tiny(name).model
    pairs = list(checkpoint_weights(model))
    assert len(dict(pairs)) == len(pairs)
    assert same(dict(pairs), saved(model, tmp_path))


@pytest.mark.parametrize("settings", [{"r": 2}, {"r": 2, "use_rslora": True, "use_dora": True}])
def test_adapters_are_merged_and_the_model_keeps_them(settings, tmp_path):
    model = tiny("llama3_2").model
    add_lora(model, settings)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    before = copy.deepcopy(model.state_dict())
    weights = dict(checkpoint_weights(model))
    assert same(model.state_dict(), before)
    merge_adapters(model)
    assert same(weights, saved(model, tmp_path))


def test_weights_are_not_copied():
    model = tiny("llama3_2").model
    own = {weight.data_ptr() for weight in model.parameters()}
    assert all(weight.data_ptr() in own for _, weight in checkpoint_weights(model))
