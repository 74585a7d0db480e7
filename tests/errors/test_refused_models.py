"""Pretrained models that the start of a run refuses, each in one line that names a key and a remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.families import FAMILIES
from support.models.tiny_families import tiny_bundle
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    PretrainedConfig,
)

from ragen_pl.models.build import load_pretrained
from ragen_pl.models.facts import family_failure
from ragen_pl.models.processor_inputs import EXAMPLE

TOKENIZER = FAMILIES["smollm2"].tokenizer()
WORDS: dict[str, Any] = {
    "vocab_size": len(TOKENIZER), "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


def save(config: PretrainedConfig, folder: Path) -> None:
    """Save a model with new weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)


@pytest.fixture
def start(fit, tmp_path: Path):
    """Save a model, start a run with it and return the refusal."""

    def call(config: PretrainedConfig, *changes: str) -> str:
        save(config, tmp_path / "model")
        changes = ("env=frozenlake", "model=pretrained", "model.build.path=model", *changes)
        refused: str = fit("context.max_tokens=300", *changes).refused()
        return refused

    return call


@pytest.mark.slow
@pytest.mark.parametrize("warm_start", [("warm_start.steps=1",), ("warm_start=none",)])
def test_a_model_that_depends_on_the_mode(start, warm_start, monkeypatch, tmp_path) -> None:
    """Before the first step of a warm start, and before the first rollout without one."""
    for switch in ("switch_dropout_off", "switch_modules_off"):
        monkeypatch.setattr(f"ragen_pl.models.pretrained.{switch}", lambda _: {})
    config = GPT2Config(**WORDS, n_embd=32, n_layer=2, n_head=2, n_positions=300)
    message = start(config, *warm_start)
    assert "model.build: log-probs of the train mode differ by" in message
    assert "family (gpt2)" in message and "choose another model" in message
    assert not [*tmp_path.rglob("*.ckpt")] and not [*tmp_path.rglob("warm_start.pt")]


EAGER = "model.build.attn_implementation=eager"


@pytest.mark.slow
def test_a_family_that_is_not_supported(start) -> None:
    config = BloomConfig(**WORDS, hidden_size=32, n_layer=2, n_head=2)
    refused = start(config, "warm_start=none", EAGER)
    assert refused == (
        "model.build.path=model: transformers' bloom takes no positions, so those of a short conversation would count "
        "the padding beside a long one; choose another family"
    )


@pytest.mark.slow
def test_what_ends_a_family_is_named_without_the_error_of_its_code(fit, tmp_path: Path) -> None:
    tiny_bundle("minimax", images=False, checked=False).save(tmp_path / "model")
    refused = fit(
        "env=frozenlake", "model=pretrained", "model.build.path=model", "context.max_tokens=300",
        "warm_start=none",
    ).refused()  # fmt: skip
    assert refused == (
        "model.build: this family (minimax) can't be run: MiniMaxModel.forward of transformers ends in ValueError; "
        "choose another model"
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("bart", "takes no positions, so those of a short conversation would count the padding"),
        ("rwkv", "takes no keys, values or states of earlier turns"),
        (
            "unlimited_ocr",
            "layers (reference_sliding_attention) read a prompt otherwise than a response",
        ),
        ("t5gemma2", "in t5gemma2 an encoder reads the prompt"),
        ("bert", "from more than token ids, or not by one layer from the states of its decoder"),
    ],
)
def test_a_text_family_is_refused_with_the_reason(name: str, reason: str) -> None:
    with pytest.raises(ValueError) as refused:
        tiny_bundle(name, images=False)
    text = str(refused.value)
    assert text.startswith("model.build") and name in text and reason in text
    assert re.search(r"; choose another (family|model)$", text) and "Error" not in text


@pytest.mark.parametrize("name", ["idefics2", "got_ocr2"])
def test_a_processor_that_reads_no_lists_of_arrays_is_refused_with_the_reason(name: str) -> None:
    images = tiny_bundle(name, images=True).images
    assert images is not None
    for shape in (EXAMPLE.shape, (56, 84, 3)):
        with pytest.raises(ValueError) as refused:
            images.replacement(np.zeros(shape, np.uint8))
        assert str(refused.value) == (
            f"model.build: the processor of {name} does not read arrays of images in a list for each text, as others "
            "do; choose another model"
        )


def test_a_size_that_a_processor_does_not_take_is_named() -> None:
    images = tiny_bundle("qwen2_vl", images=True).images
    assert images is not None
    with pytest.raises(
        ValueError, match=r"^qwen2_vl does not take images of 2 x 900 pixels \(.*aspect ratio"
    ):
        images.replacement(np.zeros((2, 900, 3), np.uint8))


def test_positions_of_the_parts_of_an_image_are_refused() -> None:
    """MiniCPM-V 4.7 places them by the size of each, a row of sizes for each part."""
    images = tiny_bundle("minicpmv4_7", images=True).images
    assert images is not None
    large = np.zeros((300, 500, 3), np.uint8)
    images.encode_together([large])
    images.settings = {**images.settings, "max_slice_nums": 4}
    images._counts.clear()
    images._replacements.clear()
    with pytest.raises(ValueError, match=r"^model\.build\.image_processor: .*max_slice_nums=1"):
        images.encode_together([large])


def test_only_what_ends_in_code_of_a_family_is_called_a_fault_of_it() -> None:
    with pytest.raises(ValueError) as foreign:
        Gemma2ForCausalLM(Gemma2Config(**WORDS, **SIZES, head_dim=16))(None)
    assert family_failure(foreign.value) == "Gemma2Model.forward of transformers ends in ValueError"
    with pytest.raises(ValueError) as own:
        tiny_bundle("bert", images=False)
    assert family_failure(own.value) is None
    full = torch.OutOfMemoryError("CUDA out of memory").with_traceback(foreign.value.__traceback__)
    assert family_failure(full) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ovis2", "model.build: transformers' ovis2 gives image features of a kind of its own"),
        ("hunyuan_vl", "model.build.path=model: in hunyuan_vl positions have 4 axes"),
    ],
)
def test_images_that_no_turn_can_show(fit, tmp_path: Path, name: str, reason: str) -> None:
    """Before the demonstrations of a warm start, which show images."""
    tiny_bundle(name, images=True, checked=False).save(tmp_path / "model")
    ended = fit(
        "env=frozenlake_visual", "model=pretrained", "model.build.path=model", "warm_start.steps=1",
        "context.max_tokens=2000",
    )  # fmt: skip
    assert ended.code == 2 and "Traceback" not in ended.stderr
    # Lightning's lines on its accelerators may come before
    line = ended.stderr.strip().splitlines()[-1]
    assert line.startswith(f"ragen_pl: {reason}") and "choose another" in line


@pytest.mark.skipif(
    Gemma2ForCausalLM._supports_sdpa,
    reason="this version of transformers takes it, without the soft cap of the scores",
)
def test_a_family_without_the_attention(tmp_path: Path) -> None:
    save(Gemma2Config(**WORDS, **SIZES, head_dim=16), tmp_path)
    with pytest.raises(
        ValueError, match=f"attn_implementation=sdpa: transformers has no .*; set {EAGER}"
    ):
        load_pretrained(str(tmp_path))
