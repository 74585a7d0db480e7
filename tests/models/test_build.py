"""Loading a model's folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ragen_pl.models.build import load_pretrained

ROLLUP = Path("/proc/self/smaps_rollup")


def anonymous_bytes() -> int:
    """Return the bytes of this process's memory that are not a file's."""
    kilobytes = re.search(r"Anonymous: +(\d+) kB", ROLLUP.read_text())
    return 1024 * int(kilobytes[1])


@pytest.mark.skipif(not ROLLUP.exists(), reason="needs Linux's table of a process's memory")
def test_weights_are_mapped_from_the_file(tmp_path):
    config = LlamaConfig(
        vocab_size=100_000, hidden_size=256, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    size = sum(weight.nbytes for weight in model.parameters())
    model.save_pretrained(tmp_path)
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 2}, "a"))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="a", eos_token="b", chat_template="{{ messages }}"
    ).save_pretrained(tmp_path)
    del model
    first = load_pretrained(str(tmp_path))  # with the packages that a load imports
    before = anonymous_bytes()
    bundle = load_pretrained(str(tmp_path))
    with torch.no_grad():
        for weight in bundle.model.parameters():
            weight.sum()
    assert anonymous_bytes() - before < 0.2 * size
    assert torch.equal(bundle.model.lm_head.weight, first.model.lm_head.weight)
