"""LoRA: only adapters are trained, the model without them is the reference, and an export merges them."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ragen_pl.models.adapters import (
    adapter_weights,
    adapters_are_new,
    adapters_off,
    merge_adapters,
    only_adapters_are_trained,
    write_adapters,
)
from ragen_pl.models.build import build_small_lm, build_small_vlm, load_pretrained
from ragen_pl.models.merging import has_adapters

LORA = {"r": 4, "lora_alpha": 8}
IDS = torch.arange(8, 40).view(2, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved small language model."""
    folder = tmp_path_factory.mktemp("model")
    build_small_lm(seed=3).save(folder)
    return folder


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def trained(model) -> None:
    """Change the adapters as training does; a fresh one adds nothing."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            with torch.no_grad():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def test_adapters_alone_are_trained_and_follow_the_seed(folder):
    before = torch.random.get_rng_state()
    plain, adapted, same, other = (
        load_pretrained(str(folder), lora=lora, seed=seed).model
        for lora, seed in ((None, 0), (LORA, 1), (LORA, 1), (LORA, 2))
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert has_adapters(adapted) and not has_adapters(plain) and type(adapted) is type(plain)
    names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert names and all("lora_" in name for name in names)
    assert len(names) == 2 * 7 * plain.config.num_hidden_layers  # all linear layers but the head
    assert torch.equal(logits(adapted), logits(plain))
    weights, theirs, others = adapted.state_dict(), same.state_dict(), other.state_dict()
    assert all(torch.equal(weights[name], theirs[name]) for name in weights)
    assert any(not torch.equal(weights[name], others[name]) for name in weights)


def test_adapters_switched_off_leave_the_model_that_was_loaded(folder):
    plain, model = (load_pretrained(str(folder), lora=lora).model for lora in (None, LORA))
    trained(model)
    learned = logits(model)
    assert not torch.allclose(learned, logits(plain), atol=1e-3)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with pytest.raises(KeyError), adapters_off(model):
        assert torch.equal(logits(model), logits(plain))
        raise KeyError
    assert torch.equal(logits(model), learned)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == before


def test_merged_it_is_a_plain_model_that_says_the_same(folder, tmp_path):
    bundle = load_pretrained(str(folder), lora=LORA)
    trained(bundle.model)
    learned = logits(bundle.model)
    merge_adapters(bundle.model)
    merge_adapters(bundle.model)  # nothing is left to merge
    assert not has_adapters(bundle.model)
    bundle.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == load_pretrained(str(folder)).model.state_dict().keys()
    torch.testing.assert_close(logits(loaded), learned, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modules_to_save": ["norm"]}, "modules_to_save and bias train weights"),
        ({"bias": "all"}, "modules_to_save and bias train weights"),
        ({"target_modules": ["lm_head", "q_proj"]}, "adapters on the embeddings or the head"),
        ({"target_modules": ["embed_tokens"]}, "adapters on the embeddings or the head"),
    ],
)
def test_what_can_not_be_merged_or_switched_off_is_refused(folder, settings, message):
    with pytest.raises(ValueError, match=message):
        load_pretrained(str(folder), lora={**LORA, **settings})


@pytest.fixture(scope="module")
def vlm_folder(tmp_path_factory):
    """A small vision-language model, as somebody may have saved it."""
    folder = tmp_path_factory.mktemp("vlm")
    build_small_vlm(seed=0).save(folder)
    return folder


def parts_of(names: Iterable[str]) -> set[str]:
    return {name.split(".")[1] for name in names}


@pytest.mark.parametrize(
    ("settings", "adapted", "trained"),
    [
        ({"lora": LORA}, {"language_model"}, set()),
        ({"lora": LORA, "freeze_vision": False}, {"language_model", "vision"}, set()),
        ({"lora": LORA, "freeze_projector": False}, {"language_model"}, {"projector"}),
        ({}, set(), {"language_model", "vision", "projector"}),
        ({"freeze_vision": True}, set(), {"language_model", "projector"}),
        ({"freeze_vision": True, "freeze_projector": True}, set(), {"language_model"}),
        ({"freeze_projector": True}, set(), {"language_model", "vision"}),
    ],
)
def test_encoder_and_projector_are_trained_or_not(vlm_folder, settings, adapted, trained):
    model = load_pretrained(str(vlm_folder), **settings).model
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert parts_of(name for name in names if "lora_" in name) == adapted
    assert parts_of(name for name in names if "lora_" not in name) == trained


def test_named_targets_are_sought_in_the_decoder(vlm_folder):
    targets = {**LORA, "target_modules": ["q_proj", "v_proj", "proj"]}
    model = load_pretrained(str(vlm_folder), lora=targets).model
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert names and parts_of(names) == {"language_model"}
    own = {**targets, "exclude_modules": ["q_proj"]}
    model = load_pretrained(str(vlm_folder), lora=own, freeze_vision=False).model
    names = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert parts_of(names) == {"language_model", "vision"}
    assert not any("q_proj" in name for name in names)


@pytest.mark.parametrize("targets", [["no_such_layer"], ["qkv"]])
def test_targets_that_no_layer_has_are_refused(vlm_folder, targets):
    with pytest.raises(ValueError, match=r"target_modules=.*build\.freeze_vision=false"):
        load_pretrained(str(vlm_folder), lora={**LORA, "target_modules": targets})


@pytest.mark.parametrize("key", ["freeze_vision", "freeze_projector"])
def test_parts_that_a_text_model_lacks_are_refused(folder, key):
    with pytest.raises(
        ValueError, match=rf"model\.build\.{key}=true: LlamaForCausalLM has no such"
    ):
        load_pretrained(str(folder), **{key: True})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_adapters_are_in_float32_on_any_base(folder, dtype):
    model = load_pretrained(str(folder), dtype=dtype, lora=LORA).model
    assert {w.dtype for w in model.parameters() if w.requires_grad} == {torch.float32}
    assert {w.dtype for w in model.parameters() if not w.requires_grad} == {getattr(torch, dtype)}
    assert logits(model).dtype is getattr(torch, dtype)


def test_adapters_are_new_until_they_are_trained(folder, vlm_folder):
    model = load_pretrained(str(folder), lora=LORA).model
    assert only_adapters_are_trained(model) and adapters_are_new(model)
    trained(model)
    assert only_adapters_are_trained(model) and not adapters_are_new(model)
    assert not only_adapters_are_trained(load_pretrained(str(folder)).model)
    with_projector = load_pretrained(str(vlm_folder), lora=LORA, freeze_projector=False).model
    assert not only_adapters_are_trained(with_projector)


def test_written_adapters_are_those_of_a_saved_model(folder, tmp_path):
    bundle = load_pretrained(str(folder), lora=LORA)
    trained(bundle.model)
    write_adapters(bundle.model, adapter_weights(bundle.model), tmp_path / "own")
    bundle.model.save_pretrained(tmp_path / "saved")
    own, saved = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("own", "saved")
    )
    assert own.keys() == saved.keys() and all(own[name].equal(saved[name]) for name in saved)
    settings = [
        json.loads((tmp_path / name / "adapter_config.json").read_text())
        for name in ("own", "saved")
    ]
    for one in settings:
        one["target_modules"] = sorted(one["target_modules"])
    assert settings[0] == settings[1]
