"""The small vision-language model as a transformers model: images in their places, caches, saving and loading."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor

from ragen_pl.models.build import build_small_vlm
from ragen_pl.models.facts import ModelFacts
from ragen_pl.models.small_vlm.configuration import SmallVLMConfig

PROMPT = "<|user|><|image|>reach the goal<|assistant|>"


@pytest.fixture(scope="module")
def bundle():
    return build_small_vlm(seed=3)


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)


@pytest.fixture
def inputs(bundle, images):
    return bundle.processor(images=list(images), text=[PROMPT] * 2)


@torch.no_grad()
def logits(model, **inputs) -> torch.Tensor:
    return model(**inputs).logits


def test_same_seed_same_weights_and_the_global_generator_is_left_alone(bundle):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    again, other = build_small_vlm(seed=3), build_small_vlm(seed=4)
    assert torch.equal(torch.rand(3), expected)
    weights = bundle.model.state_dict()
    assert all(
        torch.equal(weights[name], value) for name, value in again.model.state_dict().items()
    )
    assert not torch.equal(logits_row(again), logits_row(other))


def logits_row(bundle) -> torch.Tensor:
    return logits(bundle.model, input_ids=torch.tensor([[2, 40, 3]]))


def test_same_logits_after_saving_and_loading(bundle, inputs, images, tmp_path):
    bundle.save(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    again = processor(images=list(images), text=[PROMPT] * 2)
    assert torch.equal(logits(model, **again), logits(bundle.model, **inputs))
    assert model.lm_head.weight is model.get_input_embeddings().weight
    base = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(
        base(**inputs).last_hidden_state, bundle.model.model(**inputs).last_hidden_state
    )


def test_settings_reach_the_decoder_when_loading(bundle, tmp_path):
    bundle.save(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.bfloat16
    )
    assert model.model.language_model.config._attn_implementation == "eager"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    pixels = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
    assert model.get_image_features(pixels).pooler_output.dtype == torch.bfloat16


def test_weights_that_a_folder_lacks_are_drawn_anew(bundle, tmp_path):
    bundle.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lost = [name for name in weights if "gain" in name or "projector.0" in name or "norm1" in name]
    save_file(
        {k: v for k, v in weights.items() if k not in lost},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path).state_dict()
    assert loaded["model.vision.patch_embed.gain"].std() == pytest.approx(1.0, abs=0.1)
    assert loaded["model.projector.0.weight"].abs().max() == pytest.approx(96**-0.5, rel=0.05)
    assert loaded["model.vision.blocks.0.norm1.weight"].eq(1).all()
    assert torch.equal(loaded["model.projector.2.weight"], weights["model.projector.2.weight"])


def test_other_sizes_are_built_from_the_config(tmp_path):
    small = build_small_vlm(
        seed=0,
        vision={"width": 32, "depth": 2, "patch_size": 8},
        text={"hidden_size": 64, "num_hidden_layers": 1},
    )
    assert len(small.model.model.vision.blocks) == 2 and small.hidden_size == 64
    assert small.num_image_tokens(np.zeros((16, 24, 3), dtype=np.uint8)) == 6
    small.save(tmp_path)
    config = SmallVLMConfig.from_pretrained(tmp_path)
    assert config.vision["width"] == 32 and config.text_config.hidden_size == 64


def test_an_unknown_vision_setting_is_named():
    with pytest.raises(ValueError, match=r"unknown keys \['dept'\].*depth"):
        build_small_vlm(seed=0, vision={"dept": 2})


# ---- images


def test_images_fill_their_own_slots_in_order(bundle, inputs, images):
    ids = inputs["input_ids"]
    embeds = bundle.model.get_input_embeddings()(ids)
    features = bundle.images.encode(list(images)).tokens.view(2, 16, 128)
    first = int((ids[0] == bundle.image_token_id).nonzero()[0])
    embeds = torch.cat([embeds[:, :first], features, embeds[:, first + 16 :]], dim=1)
    assert torch.equal(logits(bundle.model, inputs_embeds=embeds), logits(bundle.model, **inputs))


def test_an_image_is_seen_from_its_slots_on_only(bundle, inputs):
    before = logits(bundle.model, **inputs)
    changed = dict(inputs) | {"pixel_values": inputs["pixel_values"].flip(0)}
    after = logits(bundle.model, **changed)
    assert torch.equal(before[:, 0], after[:, 0])
    assert (before[:, 1:] != after[:, 1:]).any(-1).all()


def test_slots_and_features_that_do_not_match_raise(bundle, inputs):
    with pytest.raises(ValueError, match="32 image slots for 16 image features"):
        bundle.model(input_ids=inputs["input_ids"], pixel_values=inputs["pixel_values"][:1])


@pytest.mark.parametrize(
    ("height", "width", "cells"), [(64, 64, 16), (96, 96, 36), (16, 128, 8), (128, 128, 64)]
)
def test_images_of_any_number_of_cells_are_read(bundle, height, width, cells):
    image = np.full((height, width, 3), 7, dtype=np.uint8)
    features = bundle.images.encode([image, image]).tokens.view(2, -1, 128)
    assert features.shape == (2, cells, 128) and bundle.num_image_tokens(image) == cells
    assert torch.equal(features[0], features[1])


@pytest.mark.parametrize("shape", [(60, 64), (64, 144), (8, 8)])
def test_images_that_are_not_whole_cells_or_too_many_are_refused(bundle, shape):
    with pytest.raises(ValueError, match=r"multiples of 16 up to 128; set model\.build\.vision"):
        bundle.model.get_image_features(torch.zeros(1, 3, *shape))


def test_bytes_and_floats_are_the_same_image(bundle, inputs):
    pixels = inputs["pixel_values"]
    assert pixels.dtype == torch.uint8
    encode = bundle.model.get_image_features
    assert torch.equal(encode(pixels).pooler_output, encode(pixels.float()).pooler_output)


def test_a_cells_content_reaches_its_neighbours_and_no_further(bundle, images):
    stem = bundle.model.model.vision.patch_embed
    before = bundle.processor.image_processor(list(images[:1]))["pixel_values"]
    after = before.clone()
    after[:, :, 16:32, 0:16] = 255 - after[:, :, 16:32, 0:16]  # row 1, column 0
    changed = (stem(before) != stem(after)).any(-1).view(4, 4)
    expected = torch.zeros(4, 4, dtype=torch.bool)
    expected[0:3, 0:2] = True
    assert torch.equal(changed, expected)


def test_the_stem_is_its_formula(bundle, images):
    stem = bundle.model.model.vision.patch_embed
    scaled = torch.from_numpy(images[0]).permute(2, 0, 1) / 127.5 - 1
    cells = torch.stack(
        [stem.norm(stem.patch(scaled[:, 16 * r : 16 * r + 16, 16 * c : 16 * c + 16].flatten()))
         for r in range(4) for c in range(4)]
    ).view(4, 4, -1)  # fmt: skip
    around = functional.conv2d(
        cells.permute(2, 0, 1)[None], stem.neighbors.weight, stem.neighbors.bias, padding=1
    )[0].permute(1, 2, 0)
    expected = (
        cells * stem.gain[:4, :4] + stem.rows[:4] + stem.columns[:, :4] + functional.gelu(around)
    )
    embedded = stem(bundle.processor.image_processor(list(images[:1]))["pixel_values"]).view(
        4, 4, -1
    )
    assert torch.allclose(embedded, expected, atol=1e-5)


# ---- the decoder


def test_every_weight_learns(inputs):
    model = build_small_vlm(seed=0, vision={"max_cells": 4}).model
    output = model(**inputs, labels=inputs["input_ids"])
    output.loss.backward()
    assert [
        name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()
    ] == []


def test_loss_is_the_mean_cross_entropy_of_the_next_tokens(bundle, inputs):
    labels = inputs["input_ids"].clone()
    labels[:, :18] = -100
    with torch.no_grad():
        output = bundle.model(**inputs, labels=labels)
    expected = functional.cross_entropy(
        output.logits[:, 17:-1].flatten(0, 1), labels[:, 18:].flatten()
    )
    assert torch.allclose(output.loss, expected)


def test_logits_of_the_last_positions_only(bundle, inputs):
    whole = logits(bundle.model, **inputs)
    assert torch.allclose(
        logits(bundle.model, **inputs, logits_to_keep=2), whole[:, -2:], atol=1e-6
    )


def test_one_token_at_a_time_on_a_cache_is_the_same(bundle, inputs):
    more = torch.tensor([[40, 41, 42], [43, 44, 45]])
    ids = torch.cat([inputs["input_ids"], more], dim=1)
    whole = logits(bundle.model, input_ids=ids, pixel_values=inputs["pixel_values"])
    with torch.no_grad():
        output = bundle.model(**inputs, use_cache=True)
        for step in range(3):
            output = bundle.model(
                input_ids=more[:, step : step + 1],
                past_key_values=output.past_key_values,
                use_cache=True,
            )
            assert torch.allclose(output.logits[:, 0], whole[:, step - 3], atol=1e-5)


def test_padding_on_the_left_changes_nothing(bundle, inputs):
    real = inputs["input_ids"]
    ids = torch.cat([torch.zeros(2, 3, dtype=torch.int64), real], dim=1)
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.int64), torch.ones_like(real)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    time = ids.shape[1]
    square = torch.ones(time, time, dtype=torch.bool).tril() & mask.bool()[:, None, None, :]
    square = square | torch.eye(time, dtype=torch.bool)
    expected = logits(bundle.model, **inputs)
    for attention_mask in (mask, square):
        padded = logits(
            bundle.model, input_ids=ids, pixel_values=inputs["pixel_values"],
            attention_mask=attention_mask, position_ids=positions,
        )  # fmt: skip
        assert torch.allclose(padded[:, 3:], expected, atol=1e-5)


def test_positions_that_are_given_are_used(bundle, inputs):
    positions = torch.arange(inputs["input_ids"].shape[1])[None].expand(2, -1)
    default = logits(bundle.model, **inputs)
    assert torch.allclose(
        logits(bundle.model, **inputs, position_ids=positions + 7), default, atol=1e-4
    )
    assert not torch.allclose(
        logits(bundle.model, **inputs, position_ids=3 * positions), default, atol=1e-2
    )


def test_generate_with_images_is_greedy_search(bundle, inputs):
    generated = bundle.model.generate(
        **inputs, max_new_tokens=4, do_sample=False, eos_token_id=None
    )
    ids = inputs["input_ids"]
    for _ in range(4):
        best = logits(bundle.model, input_ids=ids, pixel_values=inputs["pixel_values"])[
            :, -1
        ].argmax(-1)
        ids = torch.cat([ids, best[:, None]], dim=1)
    assert torch.equal(generated, ids)


# ---- the processor


def test_pil_images_and_arrays_are_the_same(bundle, images):
    from PIL import Image

    as_pil = bundle.processor.image_processor([Image.fromarray(image) for image in images])
    pixels = bundle.processor.image_processor(list(images))["pixel_values"]
    assert torch.equal(as_pil["pixel_values"], pixels) and pixels.is_contiguous()
    assert torch.equal(pixels[1, 2], torch.from_numpy(images[1, :, :, 2]))
    assert torch.equal(bundle.processor.image_processor(images)["pixel_values"], pixels)


def test_images_of_two_sizes_are_refused(bundle, images):
    with pytest.raises(ValueError, match=r"\(32, 32, 3\), \(64, 64, 3\).*one shape"):
        bundle.processor(images=[images[0], images[1, :32, :32]])


def test_images_of_floats_are_refused(bundle, images):
    with pytest.raises(ValueError, match="float64, expected uint8"):
        bundle.processor(images=[images[0] / 255])


def test_placeholders_are_expanded_and_counted(bundle, images):
    text = "<|user|><|image|>then<|image|>"
    data = bundle.processor(images=list(images), text=text)
    image = bundle.image_token_id
    then = bundle.tokenizer("then")["input_ids"]
    assert data["input_ids"][0].tolist() == [2, *[image] * 16, *then, *[image] * 16]
    for too_few in (list(images[:1]), None):
        with pytest.raises(ValueError, match=r"(?i)found .*2 "):
            bundle.processor(images=too_few, text=text)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("first", [0, 5, 16])
def test_states_from_a_position_on_are_those_of_the_whole_sequence(inputs, attention, first):
    """Gradients too, and those of the keys and values before it."""
    model = build_small_vlm(seed=3).model.base_model
    model.language_model.set_attn_implementation(attention)

    def states_and_gradient(**settings: int) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        states = model(**inputs, **settings).last_hidden_state[:, -3:]
        states.square().sum().backward()
        return states.detach(), model.projector[0].weight.grad.clone()

    whole, gradient = states_and_gradient()
    part, same = states_and_gradient(first_read=first)
    torch.testing.assert_close(part, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(same, gradient, atol=1e-4, rtol=1e-4)


def test_only_states_that_are_read_pass_the_last_layers_network(inputs):
    model = build_small_vlm(seed=3).model.base_model
    columns: list[int] = []
    last = model.language_model.layers[-1].mlp
    last.register_forward_pre_hook(lambda _, arguments: columns.append(arguments[0].shape[1]))
    states = model(**inputs, first_read=12).last_hidden_state
    assert columns == [states.shape[1]] == [inputs["input_ids"].shape[1] - 12]


@pytest.mark.parametrize(("attention", "reads_end"), [("sdpa", True), ("flex_attention", False)])
def test_attention_without_a_mask_to_cut_computes_all_states(attention, reads_end):
    model = build_small_vlm(seed=3).model
    model.base_model.language_model.set_attn_implementation(attention)
    assert ModelFacts.of(model).reads_end is reads_end
