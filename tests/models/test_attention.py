"""Attention over windows and images that lie one after the other, in one call a layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.family_models import MODELS, tiny
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForImageTextToText, modeling_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragen_pl.memory.tensors import TensorWithoutData
from ragen_pl.models.attention import PACKED, pack_images, packed_attention
from ragen_pl.models.build import load_pretrained
from ragen_pl.models.bundle import ModelBundle

IMAGES = [name for name, family in MODELS.items() if family.processor is not None]
PACKING = ["qwen2_5_vl", "qwen3_vl", "qwen3_5_vl"]
# in Qwen2.5-VL, windows of several lengths
SIZES = ((140, 84), (56, 56), (140, 84), (28, 112))


def pictures() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES]


def encoder_of(bundle: ModelBundle) -> Any:
    return bundle.model.get_encoder(modality="image")


def features_and_gradients(bundle: ModelBundle) -> tuple[Tensor, dict[str, Tensor]]:
    assert bundle.images is not None
    features = bundle.images.encode(pictures())
    tensors = (features.tokens, *features.deepstack)
    torch.stack([(each * each.detach().cos()).sum() for each in tensors]).sum().backward()
    gradients = {
        name: weight.grad
        for name, weight in encoder_of(bundle).named_parameters()
        if weight.grad is not None
    }
    return torch.cat([each.detach().flatten() for each in tensors]), gradients


def test_the_encoders_that_take_bounds_attend_packed() -> None:
    packed = [
        name for name in IMAGES if encoder_of(tiny(name)).config._attn_implementation == PACKED
    ]
    assert packed == PACKING
    for name in MODELS:
        model = tiny(name).model
        assert model.config.get_text_config()._attn_implementation == "sdpa"


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", PACKING)
def test_features_and_gradients_are_those_of_sdpa(name: str, checkpointed: bool) -> None:
    found = []
    for attention in (PACKED, "sdpa"):
        bundle = tiny(name)
        encoder_of(bundle).config._attn_implementation = attention
        if checkpointed:
            bundle.checkpoint_layers()
            bundle.model.train()
        found.append(features_and_gradients(bundle))
    (packed, packed_gradients), (looped, gradients) = found
    torch.testing.assert_close(packed, looped, rtol=1e-5, atol=1e-5)
    assert packed_gradients.keys() == gradients.keys()
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 0
    for weight, gradient in gradients.items():
        assert float((packed_gradients[weight] - gradient).abs().max()) < 1e-5 * largest, weight


@pytest.mark.parametrize("name", PACKING)
def test_one_call_a_layer_attends_in_all_pictures(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tiny(name)
    bounds: list[Tensor] = []

    def counted(*arguments: Any, cu_seq_lens_q: Tensor, **others: Any) -> Any:
        bounds.append(cu_seq_lens_q)
        return packed_attention(*arguments, cu_seq_lens_q=cu_seq_lens_q, **others)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, PACKED, counted)
    assert bundle.images is not None
    bundle.images.encode([picture for picture in pictures() for _ in range(3)])
    # pictures of each of the three sizes are encoded in one call
    assert len(bounds) == 3 * len(encoder_of(bundle).blocks)
    assert all(len(each) > 3 for each in bounds)


def segments(lengths: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Return bounds, and queries, keys and values with fewer heads."""
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    time = sum(lengths)
    shapes = [(1, 4, time, 8), (1, 2, time, 8), (1, 2, time, 8)]
    return bounds, [torch.randn(shape, requires_grad=True) for shape in shapes]


def each_alone(tensors: list[Tensor], lengths: list[int], *, causal: bool) -> Tensor:
    parts = zip(*(each.split(lengths, dim=2) for each in tensors), strict=True)
    outputs = [
        functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=True, scale=0.3
        )
        for query, key, value in parts
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [3, 7, 3, 1, 0, 7]])
def test_each_sequence_attends_to_itself_only(lengths: list[int], causal: bool) -> None:
    torch.manual_seed(0)
    bounds, tensors = segments(lengths)
    query, key, value = tensors
    output, weights = packed_attention(
        torch.nn.Identity(), query, key, value, cu_seq_lens_q=bounds, max_length_q=max(lengths), scaling=0.3,
        is_causal=causal,
    )  # fmt: skip
    expected = each_alone(tensors, lengths, causal=causal)
    assert weights is None
    torch.testing.assert_close(output, expected)
    factors = torch.randn_like(output)
    own, others = (
        torch.autograd.grad((each * factors).sum(), tensors) for each in (output, expected)
    )
    torch.testing.assert_close(own, others)


def test_sixteen_bits_under_autocast() -> None:
    bounds, (query, key, value) = segments([4, 6])
    call: Callable[..., Any] = partial(
        packed_attention,
        torch.nn.Identity(),
        query,
        key,
        value,
        cu_seq_lens_q=bounds,
        max_length_q=6,
    )
    assert call()[0].dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call()[0].dtype == torch.bfloat16


def test_tensors_without_data_run_the_kernel_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a GPU's memory: no copies of what is gathered by length."""
    monkeypatch.setattr("ragen_pl.models.attention._by_length", None)
    bounds = torch.tensor([0, 3, 10], dtype=torch.int32)
    empty = torch.empty(1, 2, 10, 80, dtype=torch.bfloat16, device="meta")
    tensors = [TensorWithoutData(empty.clone(), requires_grad=True) for _ in range(3)]
    query, key, value = tensors
    output, _ = packed_attention(
        torch.nn.Identity(),
        query,
        key,
        value,
        cu_seq_lens_q=bounds,
        max_length_q=7,
        on_gpu=True,
    )
    output.sum().backward()
    assert output.shape == (1, 10, 2, 80) and output.dtype == torch.bfloat16
    assert all(each.grad is not None and each.grad.shape == each.shape for each in tensors)


def test_no_package_is_looked_for_and_no_file_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", refused)
    tiny("qwen2_5_vl").save(tmp_path / "first")
    loaded = load_pretrained(str(tmp_path / "first"))
    assert encoder_of(loaded).config._attn_implementation == PACKED
    loaded.save(tmp_path / "second")
    text = (tmp_path / "second" / "config.json").read_text()
    assert "flash" not in text and "_attn_implementation" not in json.loads(text)
    alone = AutoModelForImageTextToText.from_pretrained(tmp_path / "second")
    assert alone.config.vision_config._attn_implementation == "sdpa"


def test_attention_that_is_asked_for_is_kept(tmp_path: Path) -> None:
    tiny("qwen2_5_vl").save(tmp_path)
    for attention in ("sdpa", "eager"):
        bundle = load_pretrained(str(tmp_path), attn_implementation=attention)
        assert encoder_of(bundle).config._attn_implementation == attention
        assert pack_images(bundle.model) is (attention == "sdpa")
