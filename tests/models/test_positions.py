"""Positions: frequencies that depend on the length are the same in every call; tables of positions are large enough."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.compared_logprobs import agree
from support.models.families import FAMILIES
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from ragen_pl.engines.in_process.engine import TransformersEngine
from ragen_pl.models.build import load_pretrained
from ragen_pl.models.positions import fix_rotary_scaling
from ragen_pl.models.pretrained import log_once
from ragen_pl.modules.policy import PolicyModule
from ragen_pl.prompts.context import ContextManager
from ragen_pl.rollout.agreement import check_agreement

TOKENIZER = FAMILIES["smollm2"].tokenizer()
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": len(TOKENIZER), "pad_token_id": 0,
}  # fmt: skip
# conversations of `three_ways` have up to 200 tokens
ORIGINAL, LONGEST = 80, 400
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.5, 3.5, 4.5], "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def longrope() -> Phi3Config:
    return Phi3Config(
        **SIZES, rope_parameters=dict(LONGROPE), max_position_embeddings=8 * ORIGINAL,
        original_max_position_embeddings=ORIGINAL,
    )  # fmt: skip


def dynamic() -> LlamaConfig:
    return LlamaConfig(**SIZES, rope_parameters=dict(DYNAMIC), max_position_embeddings=ORIGINAL)


def experts() -> PhimoeConfig:
    scaling = LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3}
    return PhimoeConfig(
        **SIZES, rope_parameters=scaling, max_position_embeddings=8 * ORIGINAL,
        original_max_position_embeddings=ORIGINAL, num_local_experts=2,
    )  # fmt: skip


def model_of(config: PretrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(torch.randn_like(parameter) * 2.0 * parameter.shape[-1] ** -0.5)
    return model.eval()


def saved(config: PretrainedConfig, folder: Path) -> str:
    model_of(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def states(model: PreTrainedModel, length: int) -> torch.Tensor:
    ids = torch.arange(length)[None] % len(TOKENIZER)
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("kind", [longrope, dynamic, experts])
def test_conversations_across_the_original_length_agree(kind: Any, tmp_path: Path) -> None:
    bundle = load_pretrained(saved(kind(), tmp_path), max_tokens=LONGEST)
    episodes = agree(bundle)
    lengths = [len(said.prompt.ids) for episode in episodes for said in episode]
    assert min(lengths) < ORIGINAL < max(lengths)


@pytest.mark.parametrize("kind", [longrope, dynamic])
def test_frequencies_are_those_of_the_longest_conversation(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, whole = saved(kind(), tmp_path), LONGEST // 2
    log_once.cache_clear()
    caplog.set_level(logging.INFO)

    def lines() -> list[str]:
        # transformers' own come here too once another test has let it log
        own = (record for record in caplog.records if record.name.startswith("ragen_pl"))
        return [record.getMessage() for record in own]

    short = load_pretrained(path, max_tokens=ORIGINAL).model
    assert not lines()
    long = load_pretrained(path, max_tokens=whole).model
    (line,) = lines()
    assert f"is that of {whole} tokens" in line and f"original length of {ORIGINAL}" in line
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(states(long, whole), states(model_of(kind()), whole), **tolerance)
    plain = model_of(kind())
    torch.testing.assert_close(states(short, ORIGINAL), states(plain, ORIGINAL), **tolerance)
    # what comes later changes nothing before
    torch.testing.assert_close(states(long, whole)[:, :30], states(long, 30), **tolerance)
    early = states(plain, 30)
    assert (states(plain, whole)[:, :30] - early).abs().max() > 0.1
    # a saved model has them whatever it is loaded for
    long.save_pretrained(tmp_path)
    again = load_pretrained(path).model
    torch.testing.assert_close(states(again, whole), states(long, whole), rtol=0, atol=0)
    assert again.config.max_position_embeddings >= whole


def test_a_scaling_in_bfloat16_passes_the_check_at_the_start(tmp_path: Path) -> None:
    bundle = load_pretrained(saved(dynamic(), tmp_path), max_tokens=LONGEST, dtype="bfloat16")
    engine = TransformersEngine(PolicyModule(bundle))
    check_agreement(ContextManager(bundle, max_tokens=LONGEST), engine, image_size=None)


def test_scalings_of_some_layers_are_fixed() -> None:
    plain = {"rope_type": "default", "rope_theta": 10000.0}

    def fixed_layers(sliding: dict[str, Any]) -> dict[str, Any]:
        layers = {"full_attention": dict(DYNAMIC), "sliding_attention": dict(sliding)}
        text = Gemma3TextConfig(**SIZES, rope_parameters=layers, max_position_embeddings=ORIGINAL)
        config = Gemma3Config(text_config=text)
        line = fix_rotary_scaling(config, max_tokens=2 * ORIGINAL)
        assert line is not None and "dynamic" in line
        return config.text_config.rope_parameters

    fixed = fixed_layers(plain)
    assert fixed["full_attention"]["rope_type"] == "default"
    # (factor * length / original - (factor - 1)) ** (d / (d - 2)), with heads of 256
    assert fixed["full_attention"]["rope_theta"] == pytest.approx(10000.0 * 5 ** (256 / 254))
    assert fixed["sliding_attention"]["rope_theta"] == 10000.0
    both = fixed_layers(DYNAMIC)
    assert both["sliding_attention"] == both["full_attention"] == fixed["full_attention"]


def test_a_table_of_positions_that_is_too_small_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=len(TOKENIZER), n_embd=32, n_layer=1, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    path = saved(config, tmp_path)
    with pytest.raises(
        ValueError, match=r"context\.max_tokens=65: .* 64 tokens; set .*=64 or less"
    ):
        load_pretrained(path, max_tokens=65)
    assert load_pretrained(path, max_tokens=64).model.config.n_positions == 64
