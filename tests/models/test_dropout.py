"""A loaded model computes the same in train and in eval mode: its dropout and router noise are off."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.families import FAMILIES
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BioGptConfig,
    CLIPVisionConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    OPTConfig,
    PhimoeConfig,
    PretrainedConfig,
)

from ragen_pl.models.build import load_pretrained
from ragen_pl.models.dropout import switch_dropout_off, switch_modules_off
from ragen_pl.models.pretrained import log_once

TOKENIZER = FAMILIES["smollm2"].tokenizer()
WORDS = {"vocab_size": len(TOKENIZER), "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS: dict[str, tuple[PretrainedConfig, str]] = {
    "gpt2": (GPT2Config(**WORDS, n_embd=32, n_layer=2, n_head=2, n_positions=64), "resid_pdrop=0.1"),
    "biogpt": (
        BioGptConfig(**WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64),
        "hidden_dropout_prob=0.1",
    ),
    "opt": (
        OPTConfig(
            **WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=64, word_embed_proj_dim=32,
            layerdrop=0.5,
        ),
        "layerdrop=0.5",
    ),
    "experts with noise": (
        PhimoeConfig(**WORDS, **SIZES, num_local_experts=4, input_jitter_noise=0.3),
        "router_jitter_noise=0.01",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_train_and_eval_mode_agree(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, named = CONFIGS[name]
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config)
    plain.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    log_once.cache_clear()
    caplog.set_level(logging.INFO)
    model = load_pretrained(str(tmp_path)).model
    (line,) = [record.getMessage() for record in caplog.records]
    assert "dropout and noise are off" in line and named in line

    def difference(of: Any) -> float:
        ids = torch.arange(24)[None]
        with torch.no_grad():
            evaluated, trained = of.eval()(ids).logits, of.train()(ids).logits
        return float((evaluated - trained).abs().max())

    assert difference(plain) > 1e-3
    assert difference(model) == 0.0


def test_parts_of_a_config_and_modules_without_one() -> None:
    config = LlavaConfig(
        text_config=LlamaConfig(**SIZES, attention_dropout=0.2),
        vision_config=CLIPVisionConfig(attention_dropout=0.3),
    )
    found = switch_dropout_off(config)
    assert found == {
        "text_config.attention_dropout": 0.2,
        "vision_config.attention_dropout": 0.3,
    }
    assert config.text_config.attention_dropout == config.vision_config.attention_dropout == 0.0
    assert switch_dropout_off(config) == {}
    model = nn.Sequential(
        nn.Dropout(0.1), nn.Linear(2, 2), nn.MultiheadAttention(4, 2, dropout=0.2)
    )
    assert switch_modules_off(model) == {"Dropout.p": 0.1, "MultiheadAttention.dropout": 0.2}
    assert switch_modules_off(model) == {}


def test_dropout_of_adapters_is_left_alone(tmp_path: Path) -> None:
    """The command line refuses it for RL; elsewhere it is a choice."""
    pytest.importorskip("peft")
    AutoModelForCausalLM.from_config(LlamaConfig(**WORDS, **SIZES)).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    model = load_pretrained(str(tmp_path), lora={"r": 2, "lora_dropout": 0.25}).model
    rates = {part.p for part in model.modules() if isinstance(part, nn.Dropout)}
    assert rates == {0.25}
