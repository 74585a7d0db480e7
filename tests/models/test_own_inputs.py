"""Inputs of the model's own forward are all that its processor gives, so that dropped ones are seen at the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.models.compared_logprobs import agree
from support.models.family_models import tiny
from support.models.tiny_families import tiny_bundle
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni

from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.engines.protocol import GenerationRequest, generate
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.images import ImageEncoder
from ragen_pl.models.processor_inputs import EXAMPLE, processed
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.agreement import check_agreement, check_trainer
from ragen_pl.trajectory import Observation


def ernie() -> ModelBundle:
    return tiny_bundle("ernie4_5_vl_moe", images=True)


BUNDLES: dict[str, Callable[[], ModelBundle]] = {
    "ernie4_5_vl_moe": ernie,
    "gemma3_vl": lambda: tiny("gemma3_vl"),
    "qwen2_5_vl": lambda: tiny("qwen2_5_vl"),
    "smolvlm": lambda: tiny("smolvlm"),
}


@pytest.mark.parametrize("name", BUNDLES)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_inputs_are_those_of_the_processor_for_the_text(name: str, count: int) -> None:
    bundle = BUNDLES[name]()
    images = [np.full((56, 84, 3), 40 * n, dtype=np.uint8) for n in range(count)]
    content = [{"type": "image"}] * count + [{"type": "text", "text": "see the goal"}]
    text = bundle.renderer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    shown = {"images": [images]} if images else {}
    expected = processed(
        bundle.processor,
        text=[text],
        return_tensors="pt",
        add_special_tokens=False,
        **shown,
        **bundle.image_settings,
    )
    found = bundle.own_inputs(expected["input_ids"][0].numpy(), images)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)


LARGE = {"size": {"shortest_edge": 140 * 140, "longest_edge": 168 * 168}}

CROPS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.0,
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ernie4_5_vl_moe", LARGE),
        ("qwen2_5_vl", LARGE),
        ("gemma3_vl", CROPS),
    ],
)
def test_types_of_tokens_are_read_with_the_settings_of_images(
    name: str, settings: dict[str, Any]
) -> None:
    """An image has another number of tokens with them."""
    plain = BUNDLES[name]()
    sized = ModelBundle(plain.model, plain.tokenizer, plain.processor, settings)
    assert plain.images is not None and sized.images is not None
    assert sized.num_image_tokens(EXAMPLE) > plain.num_image_tokens(EXAMPLE)
    ids = torch.arange(len(plain.model.get_input_embeddings().weight))[None]
    expected = plain.images.token_types(ids, shown=True)
    found = sized.images.token_types(ids, shown=True)
    assert found
    torch.testing.assert_close(found, expected)


def test_tokens_around_an_image_are_computed_by_the_experts_of_images() -> None:
    bundle = ernie()
    assert bundle.images is not None
    words = bundle.tokenizer.convert_tokens_to_ids(["<image>", "<img>", "</img>", "a"])
    ids = torch.tensor([words])
    for shown in (True, False):
        types = bundle.images.token_types(ids, shown=shown)
        assert types["moe_mm_token_type_ids"].tolist() == [[1, 1, 1, 0]]
        assert ("mm_token_type_ids" in types) == shown
    agree(bundle)


@pytest.mark.parametrize("dropped", ["moe_mm_token_type_ids", "mm_token_type_ids"])
def test_a_type_that_is_left_out_is_found_at_the_start(
    dropped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without an engine: the reference has what the processor gives."""
    bundle = ernie()
    context = ContextManager(bundle, system_prompt=None, max_tokens=400)
    whole = ImageEncoder.token_types

    def reduced(encoder: ImageEncoder, ids: torch.Tensor, *, shown: bool) -> dict:
        types = whole(encoder, ids, shown=shown)
        if dropped == "moe_mm_token_type_ids":
            types.pop(dropped, None)
        elif dropped in types:
            types[dropped] = torch.zeros_like(types[dropped])
        return types

    policy = PolicyModule(bundle)
    assert check_trainer(context, image_size=(56, 84), policy=policy, alone=True) < 1e-4
    monkeypatch.setattr(ImageEncoder, "token_types", reduced)
    with pytest.raises(ValueError, match=r"trainer differ by .*ernie4_5_vl_moe"):
        check_trainer(context, image_size=(56, 84), policy=policy, alone=True)
    with pytest.raises(ValueError, match=r"differ by .*ernie4_5_vl_moe"):
        check_agreement(context, TransformersEngine(policy), image_size=(56, 84))


@pytest.mark.parametrize(
    "name",
    [
        "ernie4_5_vl_moe",
        pytest.param(
            "qwen2_5_omni_thinker",
            marks=pytest.mark.skipif(
                not hasattr(modeling_qwen2_5_omni, "Qwen2_5OmniThinkerModel"),
                reason="in this transformers it has no model without a head, and is refused",
            ),
        ),
    ],
)
def test_the_token_before_an_image_is_not_part_of_a_shared_prefix(name: str) -> None:
    """Prompts that are alike up to the first image, whose begin token another pass would not know."""
    bundle = tiny_bundle(name, images=True)
    context = ContextManager(bundle, system_prompt="see the goal, then answer " * 8)
    engine = TransformersEngine(PolicyModule(bundle))
    requests = []
    for number in range(2):
        image = np.full((56, 84, 3), 90 * number, dtype=np.uint8)
        prompt = context.observe(
            context.start(""), Observation(text="see", images=[image]), max_turns=1
        )
        requests.append(
            GenerationRequest(
                session=number, prompt=prompt, max_tokens=4, temperature=1.0, seed=number
            )
        )
    together = generate(engine, requests, keep=False)
    for request, answer in zip(requests, together, strict=True):
        (alone,) = generate(engine, [request], keep=False)
        assert alone.ids.tolist() == answer.ids.tolist()
        assert np.abs(alone.logprobs - answer.logprobs).max() < 1e-4
