"""Image encoders and projectors of model families, found without their names."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

from ragen_pl.models.build import build_small_lm, build_small_vlm
from ragen_pl.models.vision_parts import VisionParts

# encoder and projector by the config of the family
FAMILIES = {
    "Qwen2_5_VLConfig": ({"visual"}, {"visual.merger"}),
    "Qwen3VLConfig": ({"visual"}, {"visual.merger", "visual.deepstack_merger_list"}),
    "Gemma3Config": ({"vision_tower"}, {"multi_modal_projector"}),
    "SmolVLMConfig": ({"vision_model"}, {"connector"}),
    "LlavaOnevisionConfig": ({"vision_tower"}, {"multi_modal_projector", "image_newline"}),
    "InternVLConfig": ({"vision_tower"}, {"multi_modal_projector"}),
    "Lfm2VlConfig": ({"vision_tower"}, {"multi_modal_projector"}),
}


def weights(model, pattern: str) -> set[str]:
    names = (name for name, _ in model.named_parameters())
    return {name.removeprefix("model.") for name in names if re.fullmatch(pattern, name)}


def check(model, encoder: set[str], projector: set[str]) -> None:
    parts = VisionParts.of(model)
    inner, between = weights(model, parts.encoder), weights(model, parts.projector)
    assert inner and between and not inner & between
    assert {name.split(".")[0] for name in inner} == encoder
    prefixes = tuple(projector)
    assert all(name.startswith(prefixes) for name in between)
    assert all(any(name.startswith(prefix) for name in between) for prefix in prefixes)
    rest = {name.removeprefix("model.") for name, _ in model.named_parameters()} - inner - between
    decoder = {id(weight) for weight in model.get_decoder().parameters()}
    decoder |= {id(weight) for weight in model.get_output_embeddings().parameters()}
    named = {name.removeprefix("model."): id(one) for name, one in model.named_parameters()}
    assert {named[name] for name in rest} == decoder


@pytest.mark.parametrize("config", FAMILIES)
def test_parts_of_a_family(config: str) -> None:
    default = getattr(transformers, config)()
    # SmolVLM's is outside of its vocabulary before transformers 5.20
    default.get_text_config().pad_token_id = None
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(default)
    check(model, *FAMILIES[config])


def test_parts_of_the_small_model() -> None:
    check(build_small_vlm().model, {"vision"}, {"projector"})


def test_a_text_model_has_none() -> None:
    assert VisionParts.of(build_small_lm().model) == VisionParts()
