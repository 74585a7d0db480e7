"""Building the small models from their configs, and loading pretrained ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from ragen_pl.constraints import Open, Seed, TextOnly, checked
from ragen_pl.models.adapters import LoraSettings, add_lora
from ragen_pl.models.bundle import ModelBundle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ragen_pl.models.settings import DecoderSettings, VisionSettings


@checked
def build_small_vlm(
    *,
    vision: VisionSettings | None = None,
    text: Annotated[DecoderSettings, Open()] | None = None,
    seed: Seed = 0,
    prompt_format: str = "free_think",
) -> ModelBundle:
    """Build the small vision-language model with weights drawn from `seed`.

    Args:
        vision: changes to the encoder's settings, see `SmallVLMConfig`.
        text: changes to the decoder's settings (`Qwen2Config`).
        seed: of the weights; the global generators are left as they were.
        prompt_format: of the responses; tags that it has besides think and answer become tokens.
    """
    from ragen_pl.models.small_vlm import (
        SmallVLMConfig,
        SmallVLMForConditionalGeneration,
        SmallVLMImageProcessor,
        SmallVLMProcessor,
    )
    from ragen_pl.models.small_vlm.tokenizer import CHAT_TEMPLATE, IMAGE, load_tokenizer

    tokenizer = load_tokenizer(prompt_format=prompt_format)
    config = SmallVLMConfig(
        vision=vision,
        text_config=_ids(tokenizer) | dict(text or {}),
        image_token_id=tokenizer.get_vocab()[IMAGE],
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with _weights_from(seed):
        model = SmallVLMForConditionalGeneration(config)
    images = SmallVLMImageProcessor(patch_size=config.vision["patch_size"])
    processor = SmallVLMProcessor(images, tokenizer, chat_template=CHAT_TEMPLATE)
    return ModelBundle(model.eval(), tokenizer, processor)


@checked
def build_small_lm(
    *,
    text: Annotated[DecoderSettings, Open()] | None = None,
    seed: Seed = 0,
    prompt_format: str = "free_think",
) -> Annotated[ModelBundle, TextOnly()]:
    """Build a small language model, for environments told in words.

    The sizes are those of the vision-language model's decoder, the architecture is Llama's:
    transformers reads the tokenizer of any saved Qwen2 as Qwen's own, whatever its file says.

    Args:
        text: changes to the decoder's settings (`LlamaConfig`).
        seed: of the weights; the global generators are left as they were.
        prompt_format: of the responses; tags that it has besides think and answer become tokens.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from ragen_pl.models.small_vlm.configuration import TEXT
    from ragen_pl.models.small_vlm.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(prompt_format=prompt_format)
    settings = TEXT | {"attention_bias": True} | _ids(tokenizer) | dict(text or {})
    with _weights_from(seed):
        model = LlamaForCausalLM(LlamaConfig(**settings))
    return ModelBundle(model.eval(), tokenizer)


def _ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }


@contextmanager
def _weights_from(seed: int) -> Iterator[None]:
    """Seed the CPU's generator for a while; a GPU's, which `torch.manual_seed` seeds too, is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@checked
def load_pretrained(
    path: str,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    attn_implementation: Literal["sdpa", "eager"] = "sdpa",
    local_files_only: bool = False,
    lora: Annotated[LoraSettings, Open()] | None = None,
    seed: Seed = 0,
) -> ModelBundle:
    """Load a language or vision-language model, its tokenizer and processor.

    Args:
        path: a Hugging Face folder or the name of a model on the hub.
        dtype: of the weights, such as `float32` or `bfloat16`.
        attn_implementation: of transformers, `sdpa` or `eager`.
        local_files_only: never ask the hub.
        lora: settings of peft's `LoraConfig`: only adapters are trained. None trains all weights.
        seed: of the adapters' weights; the global generators are left as they were.

    Raises:
        FileNotFoundError: no model can be read there.
        ModuleNotFoundError: `lora` needs peft, which is not installed.
        ValueError: torch has no such `dtype`, or peft refuses a setting.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
    )

    weights = getattr(torch, dtype, None)
    if not isinstance(weights, torch.dtype):
        raise ValueError(f"model.build.dtype={dtype}: expected float32, bfloat16 or float16")
    import_module("ragen_pl.models.small_vlm")  # registers the small model with the Auto classes
    where = {"local_files_only": local_files_only or Path(path).is_dir()}
    try:
        config = AutoConfig.from_pretrained(path, **where)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"model.build.path={path}: no model can be read there ({str(error).splitlines()[0]}); "
            "give a folder written by save_pretrained, or a model's name where the hub can be reached"
        ) from error
    settings = {"dtype": weights, "attn_implementation": attn_implementation} | where
    if type(config) in AutoModelForImageTextToText._model_mapping:
        model = AutoModelForImageTextToText.from_pretrained(path, **settings)
        processor = AutoProcessor.from_pretrained(path, **where)
        tokenizer = processor.tokenizer
        if "mrope_section" in (getattr(config.get_text_config(), "rope_parameters", None) or {}):
            warnings.warn(
                f"{path} was trained with positions in rows and columns of an image; it is given plain ones, "
                "in rollouts and updates alike, and may at first see worse than it could",
                stacklevel=2,
            )
    else:
        model = AutoModelForCausalLM.from_pretrained(path, **settings)
        tokenizer, processor = _load_tokenizer(path, **where), None
    if lora is not None:
        with _weights_from(seed):
            add_lora(model, lora)
    return ModelBundle(model.eval(), tokenizer, processor)


def _load_tokenizer(path: str, *, local_files_only: bool) -> PreTrainedTokenizerBase:
    """Load a tokenizer as its file has it, also where transformers would put a known model's own in its place."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    declared = get_tokenizer_config(path, local_files_only=local_files_only).get("tokenizer_class")
    plain = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
    kind = PreTrainedTokenizerFast if plain else AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(
        path, local_files_only=local_files_only
    )
    return tokenizer
