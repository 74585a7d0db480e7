"""Building the small models from their configs, and loading pretrained ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ragen_pl.models.bundle import ModelBundle


def build_small_vlm(
    *, vision: dict[str, Any] | None = None, text: dict[str, Any] | None = None, seed: int = 0
) -> ModelBundle:
    """Build the small vision-language model with weights drawn from `seed`.

    Args:
        vision: changes to the encoder's settings, see `SmallVLMConfig`.
        text: changes to the decoder's settings (`Qwen2Config`).
        seed: of the weights; the global generators are left as they were.
    """
    from ragen_pl.models.small_vlm import (
        SmallVLMConfig,
        SmallVLMForConditionalGeneration,
        SmallVLMImageProcessor,
        SmallVLMProcessor,
    )
    from ragen_pl.models.small_vlm.tokenizer import CHAT_TEMPLATE, IMAGE, load_tokenizer

    tokenizer = load_tokenizer()
    ids = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    config = SmallVLMConfig(
        vision=vision,
        text_config=ids | {"eos_token_id": tokenizer.eos_token_id} | (text or {}),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with _weights_from(seed):
        model = SmallVLMForConditionalGeneration(config)
    images = SmallVLMImageProcessor(patch_size=config.vision["patch_size"])
    processor = SmallVLMProcessor(images, tokenizer, chat_template=CHAT_TEMPLATE)
    return ModelBundle(model.eval(), tokenizer, processor)


def build_small_lm(*, text: dict[str, Any] | None = None, seed: int = 0) -> ModelBundle:
    """Build the small model's decoder alone, for environments told in words.

    Args:
        text: changes to the decoder's settings (`Qwen2Config`).
        seed: of the weights; the global generators are left as they were.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from ragen_pl.models.small_vlm.configuration import TEXT
    from ragen_pl.models.small_vlm.tokenizer import load_tokenizer

    tokenizer = load_tokenizer()
    ids = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    with _weights_from(seed):
        model = Qwen2ForCausalLM(Qwen2Config(**(TEXT | ids | (text or {}))))
    return ModelBundle(model.eval(), tokenizer)


@contextmanager
def _weights_from(seed: int) -> Iterator[None]:
    """Seed the CPU's generator for a while; a GPU's, which `torch.manual_seed` seeds too, is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def load_pretrained(
    path: str,
    *,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    local_files_only: bool = False,
) -> ModelBundle:
    """Load a language or vision-language model, its tokenizer and processor.

    Args:
        path: a Hugging Face folder or the name of a model on the hub.
        dtype: of the weights, such as `float32` or `bfloat16`.
        attn_implementation: of transformers, such as `sdpa` or `flash_attention_2`.
        local_files_only: never ask the hub.

    Raises:
        FileNotFoundError: no model can be read there.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
    )

    from ragen_pl.models import small_vlm

    assert small_vlm.SmallVLMConfig  # importing it registers the small model with the Auto classes
    where = {"local_files_only": local_files_only or Path(path).is_dir()}
    try:
        config = AutoConfig.from_pretrained(path, **where)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"model.build.path={path}: no model can be read there ({str(error).splitlines()[0]}); "
            "give a folder written by save_pretrained, or a model's name where the hub can be reached"
        ) from error
    settings = {"dtype": getattr(torch, dtype), "attn_implementation": attn_implementation} | where
    if type(config) in AutoModelForImageTextToText._model_mapping:
        model = AutoModelForImageTextToText.from_pretrained(path, **settings)
        processor = AutoProcessor.from_pretrained(path, **where)
        return ModelBundle(model.eval(), processor.tokenizer, processor)
    model = AutoModelForCausalLM.from_pretrained(path, **settings)
    return ModelBundle(model.eval(), AutoTokenizer.from_pretrained(path, **where))
