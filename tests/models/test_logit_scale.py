"""Logits of a state are those of the model's own forward, whatever its config's keys are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from ragen_pl.models.facts import backbone_of
from ragen_pl.models.logit_scale import LogitScale

WORDS = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = WORDS | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
EYES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SIGLIP = EYES | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8}
CLIP = EYES | {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8}
GRANITE = SIZES | {"model_type": "granite", "logits_scaling": 6.0}


def _text(kind: str, **settings: Any) -> nn.Module:
    config = CONFIG_MAPPING[kind](**SIZES | settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def _vlm(kind: str, **settings: Any) -> nn.Module:
    return AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**settings))


MODELS = {
    "llama": (lambda: _text("llama"), 1.0, None),
    # multiply
    "cohere": (lambda: _text("cohere", logit_scale=0.0625), 0.0625, None),
    "cohere2": (lambda: _text("cohere2", logit_scale=0.25), 0.25, None),
    # divide
    "granite": (lambda: _text("granite", logits_scaling=6.0), 1 / 6, None),
    "granitemoe": (lambda: _text("granitemoe", logits_scaling=3.0), 1 / 3, None),
    # multiplies by what Granite divides by
    "hyperclovax": (lambda: _text("hyperclovax", logits_scaling=0.3), 0.3, None),
    # scales the states
    "minicpm3": (lambda: _text("minicpm3", dim_model_base=16), 0.5, None),
    # bound
    "gemma2": (lambda: _text("gemma2", final_logit_softcapping=30.0), 1.0, 30.0),
    # has the text config's key and does not apply it
    "aya_vision": (
        lambda: _vlm(
            "aya_vision",
            text_config=SIZES | {"model_type": "cohere2", "logit_scale": 0.0625},
            vision_config=SIGLIP,
        ),
        1.0,
        None,
    ),
    "cohere2_vision": (
        lambda: _vlm(
            "cohere2_vision",
            text_config=SIZES | {"model_type": "cohere2", "logit_scale": 0.0625},
            vision_config=SIGLIP,
        ),
        1.0,
        None,
    ),
    "granite_in_llava_next": (
        lambda: _vlm("llava_next", text_config=GRANITE, vision_config=CLIP, image_token_index=5),
        1.0,
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_of_a_state_are_the_models_own(name: str) -> None:
    build, factor, bound = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter))
    scale = LogitScale.of(model, backbone_of(model))
    assert scale == LogitScale(factor=pytest.approx(factor, rel=1e-6), bound=bound)
    ids = torch.tensor([[7, 8, 9, 10]])
    states = backbone_of(model)(input_ids=ids).last_hidden_state
    own = model(input_ids=ids).logits
    torch.testing.assert_close(scale(model.get_output_embeddings()(states)), own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_type_of_the_weights_does_not_round_the_scale(dtype: torch.dtype) -> None:
    model = _text("granite", logits_scaling=6.0).to(dtype)
    assert LogitScale.of(model, backbone_of(model)).factor == pytest.approx(1 / 6, rel=1e-9)


def test_a_model_without_data_is_measured() -> None:
    with torch.device("meta"):
        model = _text("gemma2", final_logit_softcapping=30.0)
        assert LogitScale.of(model, backbone_of(model)) == LogitScale(bound=30.0)
    assert LogitScale.of(model, backbone_of(model)) == LogitScale(bound=30.0)


@pytest.mark.parametrize(
    "change", [lambda logits: logits**3, lambda logits: logits + 1.0, torch.sigmoid]
)
def test_other_logits_are_refused(change: Any) -> None:
    model = _text("llama")
    forward = model.forward

    def changed(**inputs: Tensor) -> Any:
        output = forward(**inputs)
        output.logits = change(output.logits)
        return output

    model.forward = changed
    with pytest.raises(ValueError, match=r"model\.build: .*\(llama\).*choose another model"):
        LogitScale.of(model, backbone_of(model))


def test_a_head_that_reads_other_states_is_refused() -> None:
    model = _text("modernbert-decoder")
    with pytest.raises(ValueError, match=r"\(modernbert-decoder\) computes its logits in a way"):
        LogitScale.of(model, backbone_of(model))


def test_the_modules_compute_as_before() -> None:
    model = _text("llama")
    ids = torch.tensor([[7, 8]])
    before = model(input_ids=ids).logits
    LogitScale.of(model, backbone_of(model))
    assert model(input_ids=ids).logits.equal(before)
    assert "forward" not in vars(model.model) and "forward" not in vars(model.lm_head)
