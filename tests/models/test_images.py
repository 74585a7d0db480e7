"""Images of vision-language models: slots and features."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.family_models import MODELS, tiny

from ragen_pl.models import images as images_module
from ragen_pl.models.build import build_small_vlm
from ragen_pl.models.image_features import ImageFeatures
from ragen_pl.models.images import content_key
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.modules.reference import FrozenCopy

VISION = [name for name, family in MODELS.items() if family.processor is not None]
SEVERAL = [name for name in VISION if not MODELS[name].single_image]


def images(*sizes: tuple[int, int]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 255, (*size, 3), dtype=np.uint8) for size in sizes]


def count_encoded(bundle, monkeypatch) -> list[int]:
    calls: list[int] = []
    encode = bundle.images.encode_together
    monkeypatch.setattr(
        type(bundle.images),
        "encode_together",
        lambda self, new: calls.append(len(new)) or encode(new),
    )
    return calls


@pytest.mark.parametrize("name", VISION)
def test_images_of_several_sizes_have_the_features_that_they_have_alone(name):
    encoder = tiny(name).images
    shown = images((56, 84), (28, 56), (56, 84))
    with torch.no_grad():
        together = encoder.encode(shown)
        alone = [encoder.encode([image]) for image in shown]
    assert together.counts == tuple(encoder.num_tokens(image) for image in shown)
    for part, one in zip(together.split(), alone, strict=True):
        torch.testing.assert_close(part.tokens, one.tokens, atol=1e-5, rtol=1e-5)
        assert len(part.deepstack) == len(one.deepstack)
        if one.grids is not None:
            assert torch.equal(part.grids, one.grids)


@pytest.mark.parametrize("name", VISION)
def test_an_image_processor_alone_gives_the_inputs_of_the_whole_processor(name, monkeypatch):
    encoder = tiny(name).images
    first, second, third, fourth, fifth = images(*[(56, 84)] * 5)
    whole = encoder.inputs([[third], [fourth], [fifth]])
    received: list[dict[str, torch.Tensor]] = []
    encode = images_module.image_features_of(encoder.model)
    monkeypatch.setattr(
        images_module,
        "image_features_of",
        lambda _: lambda **inputs: received.append(inputs) or encode(**inputs),
    )
    with torch.no_grad():
        for shown in ([first], [first, second], [third, fourth, fifth]):
            encoder.encode_together(shown)
    assert received[-1].keys() == whole.keys()
    assert all(torch.equal(received[-1][key], value) for key, value in whole.items())


def test_the_slots_of_images_are_not_tokenized_again(monkeypatch):
    encoder = build_small_vlm(seed=0).images
    shown = images(*[(32, 32)] * 4)
    encoder.encode(shown[:2])
    calls: list[object] = []
    monkeypatch.setattr(type(encoder.processor), "__call__", lambda *_, **__: calls.append(1))
    features = encoder.encode(shown[2:])
    assert features.counts == (4, 4) and not calls


@pytest.mark.parametrize("name", SEVERAL)
def test_the_text_is_that_of_the_processor(name):
    bundle = tiny(name)
    shown = images((56, 84), (28, 56))
    text = f"see {bundle.images.slot} and {bundle.images.slot}."
    own = bundle.processor(images=[shown], text=[text], **bundle.image_settings)["input_ids"][0]
    expanded = bundle.expand_image_slots(text, shown)
    assert bundle.tokenizer(expanded)["input_ids"] == own


def test_images_are_encoded_in_calls_by_the_size_that_the_encoder_sees(monkeypatch):
    # its processor scales any image to 70 tokens of 12 x 12 pixels
    bundle = tiny("gemma4_vl")
    bundle.images.pixels_per_call = 2 * 70 * 12 * 12
    calls = count_encoded(bundle, monkeypatch)
    shown = images(*[(28, 56)] * 5)
    with torch.no_grad():
        features = bundle.images.encode(shown)
        alone = [bundle.images.encode([image]).tokens for image in shown]
    assert calls[:3] == [2, 2, 1]
    torch.testing.assert_close(features.tokens, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_a_frozen_encoder_sees_each_image_once(monkeypatch):
    bundle = build_small_vlm(seed=0)
    for weight in (
        *bundle.model.model.vision.parameters(),
        *bundle.model.model.projector.parameters(),
    ):
        weight.requires_grad_(False)
    calls = count_encoded(bundle, monkeypatch)
    first, second, third = images((32, 32), (32, 32), (16, 64))
    bundle.images.encode([first, second])
    with torch.inference_mode():
        bundle.images.encode([second.copy(), third])
    features = bundle.images.encode([third, first])
    assert calls == [2, 1]
    assert not features.tokens.is_inference() and features.counts == (4, 4)
    torch.testing.assert_close(features.tokens[:4], bundle.images.encode_together([third]).tokens)
    bundle.images.held.max_bytes = features.tokens.nbytes
    assert bundle.images.encode(images(*[(32, 32)] * 5)[2:]).counts == (4, 4, 4)
    assert len(bundle.images.held.by_key) == 2


def test_a_copy_with_the_same_frozen_encoder_has_its_features(monkeypatch):
    policy = PolicyModule(build_small_vlm(seed=0))
    assert not FrozenCopy().build(policy).bundle.images.frozen
    policy.freeze_vision()
    reference = FrozenCopy().build(policy)
    calls = count_encoded(policy.bundle, monkeypatch)
    (image,) = images((32, 32))
    features = [module.bundle.images.encode([image]) for module in (policy, reference)]
    assert calls == [1] and torch.equal(features[0].tokens, features[1].tokens)


def test_features_of_a_frozen_encoder_are_on_the_device_of_its_model():
    """A Trainer moves a model to a GPU, and back to the host when it has ended."""
    policy = PolicyModule(build_small_vlm(seed=0))
    policy.freeze_vision()
    (image,) = images((32, 32))
    assert policy.bundle.images.encode([image]).tokens.device.type == "cpu"
    policy.bundle.to(torch.device("meta"))
    assert policy.bundle.images.encode([image]).tokens.device.type == "meta"


def test_a_trained_encoder_sees_an_image_anew(monkeypatch):
    bundle = build_small_vlm(seed=0)
    calls = count_encoded(bundle, monkeypatch)
    for _ in range(2):
        assert bundle.images.encode(images((32, 32))).tokens.requires_grad
    assert calls == [1, 1]


@settings(max_examples=30)
@given(data=st.data(), counts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_features_are_chosen_by_image_and_patch(data, counts):
    total = sum(counts)
    features = ImageFeatures(
        tokens=torch.arange(total)[:, None].float(),
        counts=tuple(counts),
        deepstack=(torch.arange(total)[:, None] + 100.0,),
    )
    numbers = data.draw(st.lists(st.integers(0, len(counts) - 1), min_size=1, max_size=5))
    patches = [
        data.draw(st.none() | st.just(np.arange(0, counts[number], 2))) for number in numbers
    ]
    chosen = features.select(numbers, patches)
    starts = [sum(counts[:number]) for number in numbers]
    expected = [
        start + place
        for start, number, shown in zip(starts, numbers, patches, strict=True)
        for place in (range(counts[number]) if shown is None else shown)
    ]
    assert chosen.tokens[:, 0].tolist() == expected
    assert chosen.deepstack[0][:, 0].tolist() == [100 + place for place in expected]
    again = ImageFeatures.join(chosen.split())
    assert torch.equal(again.tokens, chosen.tokens) and again.counts == chosen.counts


def test_keys_tell_sizes_and_contents_apart():
    flat = np.zeros((4, 6, 3), np.uint8)
    other = flat.copy()
    other[0, 0, 0] = 1
    keys = {content_key(image) for image in (flat, other, flat.reshape(6, 4, 3))}
    assert len(keys) == 3
    # an array with gaps has the key of its content
    assert content_key(np.zeros((8, 6, 3), np.uint8)[::2]) == content_key(flat)
