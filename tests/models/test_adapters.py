"""LoRA: only adapters are trained, what lies under them is the reference, and an export has them merged."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from ragen_pl.models.adapters import adapters_off, has_adapters, merge_adapters
from ragen_pl.models.build import build_small_lm, build_small_vlm, load_pretrained

LORA = {"r": 4, "lora_alpha": 8}
IDS = torch.arange(8, 40).view(2, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small language model, as somebody may have saved it."""
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


def test_a_model_that_sees_takes_adapters(tmp_path):
    build_small_vlm(seed=0).save(tmp_path)
    bundle = load_pretrained(str(tmp_path), lora={**LORA, "target_modules": ["q_proj", "v_proj"]})
    trainable = [
        name for name, parameter in bundle.model.named_parameters() if parameter.requires_grad
    ]
    assert trainable and all("_proj.lora_" in name for name in trainable)
    with pytest.raises(ValueError, match="no_such_layer"):
        load_pretrained(str(tmp_path), lora={**LORA, "target_modules": ["no_such_layer"]})
