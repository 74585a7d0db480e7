"""Build the small models from their configs, and load pretrained models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from ragen_pl.constraints import Open, Seed, TextOnly, checked
from ragen_pl.models.adapters import LoraSettings, choose_trained_weights
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.settings import Attention

if TYPE_CHECKING:
    from transformers import (
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
    )

    from ragen_pl.models.settings import DecoderSettings, VisionSettings


@checked
def build_small_vlm(
    *,
    vision: VisionSettings | None = None,
    text: Annotated[DecoderSettings, Open()] | None = None,
    seed: Seed = 0,
    prompt_format: str = "free_think",
    words: Sequence[str] = (),
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> ModelBundle:
    """Build the small vision-language model with weights drawn from `seed`.

    Args:
        vision: Changes to the encoder's settings, see `SmallVLMConfig`.
        text: Changes to the decoder's settings (`Qwen2Config`).
        seed: Seed of the weights; the global generators keep their states.
        prompt_format: Format of the responses; its tags besides think and answer become tokens.
        words: Words that become tokens, with and without a blank before them.
        dtype: Type of the weights.
    """
    from ragen_pl.models.small_vlm import (
        SmallVLMConfig,
        SmallVLMForConditionalGeneration,
        SmallVLMImageProcessor,
        SmallVLMProcessor,
    )
    from ragen_pl.models.small_vlm.tokenizer import CHAT_TEMPLATE, IMAGE, load_tokenizer

    tokenizer = load_tokenizer(prompt_format=prompt_format, words=words)
    config = SmallVLMConfig(
        vision=dict(vision or {}),
        text_config=_ids(tokenizer) | dict(text or {}),
        image_token_id=tokenizer.get_vocab()[IMAGE],
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with _weights_from(seed):
        model = SmallVLMForConditionalGeneration(config).to(getattr(torch, dtype))
    images = SmallVLMImageProcessor(patch_size=config.vision["patch_size"])
    processor = SmallVLMProcessor(images, tokenizer, chat_template=CHAT_TEMPLATE)
    return ModelBundle(model.eval(), tokenizer, processor)


@checked
def build_small_lm(
    *,
    text: Annotated[DecoderSettings, Open()] | None = None,
    seed: Seed = 0,
    prompt_format: str = "free_think",
    words: Sequence[str] = (),
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Annotated[ModelBundle, TextOnly()]:
    """Build a small language model for text environments.

    It has the sizes of the vision-language model's decoder. The architecture is Llama's, because transformers reads the
    tokenizer of any saved Qwen2 as Qwen's own.

    Args:
        text: Changes to the decoder's settings (`LlamaConfig`).
        seed: Seed of the weights; the global generators keep their states.
        prompt_format: Format of the responses; its tags besides think and answer become tokens.
        words: Words that become tokens, with and without a blank before them.
        dtype: Type of the weights.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from ragen_pl.models.small_vlm.configuration import TEXT
    from ragen_pl.models.small_vlm.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(prompt_format=prompt_format, words=words)
    settings = TEXT | {"attention_bias": True} | _ids(tokenizer) | dict(text or {})
    with _weights_from(seed):
        model = LlamaForCausalLM(LlamaConfig(**settings)).to(getattr(torch, dtype))
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
    """Seed the CPU's generator for a while. `torch.manual_seed` would seed the GPUs' generators too."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@checked
def load_pretrained(
    path: str,
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    attn_implementation: Attention | dict[str, Attention] = "sdpa",
    local_files_only: bool = False,
    image_processor: Annotated[dict[str, Any], Open()] | None = None,
    lora: Annotated[LoraSettings, Open()] | None = None,
    freeze_vision: bool | None = None,
    freeze_projector: bool | None = None,
    seed: Seed = 0,
) -> ModelBundle:
    """Load a language or vision-language model, its tokenizer and processor.

    Args:
        path: Hugging Face folder, or name of a model on the hub.
        dtype: Type of the weights, such as `float32` or `bfloat16`.
        attn_implementation: Attention of transformers; a dictionary gives it by part of the model, such as
            `{"text_config": "sdpa", "vision_config": "flash_attention_2"}`.
        local_files_only: Whether the hub is never asked.
        image_processor: Settings of the family's image processor, such as `{"min_pixels": 50176}`,
            `{"crop_to_patches": False}`; None for its own.
        lora: Settings of peft's `LoraConfig` to train adapters only; None trains all weights.
        freeze_vision: Whether the image encoder is left unchanged; None: with `lora`.
        freeze_projector: Whether the projector of image features is left unchanged; None: with `lora`. It gets no
            adapters, but is trained itself.
        seed: Seed of the adapters' weights; the global generators keep their states.

    Raises:
        FileNotFoundError: No model can be read there.
        ModuleNotFoundError: `lora` needs peft, which is not installed.
        ValueError: torch has no such `dtype`, peft refuses a setting, the model has no part to freeze, or the attention
            can't mask as the model needs.
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
    # registers the small model with the Auto classes
    import_module("ragen_pl.models.small_vlm")
    where = {"local_files_only": local_files_only or Path(path).is_dir()}
    # no code of a model's folder is run, and nobody is asked whether it may be
    read = {**where, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(path, **read)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"model.build.path={path}: no model can be read there ({str(error).splitlines()[0]}); "
            "give a folder written by save_pretrained, or a model's name where the hub can be reached"
        ) from error
    settings = {"dtype": weights, "attn_implementation": attn_implementation} | read
    if type(config) in AutoModelForImageTextToText._model_mapping:
        model = AutoModelForImageTextToText.from_pretrained(path, **settings)
        processor = AutoProcessor.from_pretrained(path, **read)
        tokenizer = processor.tokenizer
    else:
        model = AutoModelForCausalLM.from_pretrained(path, **settings)
        tokenizer, processor = load_tokenizer(path, **where), None
    with _weights_from(seed):
        choose_trained_weights(
            model, lora=lora, freeze_vision=freeze_vision, freeze_projector=freeze_projector
        )
    if processor is not None:
        _check_image_settings(processor, image_processor or {})
    bundle = ModelBundle(model.eval(), tokenizer, processor, image_processor or {}, source=path)
    if bundle.facts.bidirectional_layers and not bundle.facts.masks_by_function:
        raise ValueError(
            f"model.build.attn_implementation: in {type(model).__name__} the tokens of an image attend to each other, "
            "which flash attention can't do; set sdpa, or {text_config: sdpa, vision_config: flash_attention_2}"
        )
    if processor is not None and not bundle.facts.takes_features:
        raise ValueError(
            f"model.build.path={path}: transformers' {bundle.facts.family} takes no encoded images, and every turn "
            "would encode all of them again; choose another family"
        )
    return bundle


def _check_image_settings(processor: ProcessorMixin, settings: Mapping[str, Any]) -> None:
    """Check the names of settings that a processor would ignore.

    Raises:
        ValueError: The image processor has no such setting.
    """
    known = set(processor.image_processor.valid_kwargs.__annotations__)
    if unknown := sorted(set(settings) - known):
        raise ValueError(
            f"model.build.image_processor.{unknown[0]}: the model's image processor has no such setting; known: "
            + ", ".join(sorted(known))
        )


def describe_pretrained(
    config: PretrainedConfig,
    *,
    dtype: str = "float32",
    attn_implementation: str | dict[str, str] = "sdpa",
    seed: int = 0,
    **trained: Any,
) -> PreTrainedModel:
    """Build the model that `load_pretrained` would load, with new weights. Nothing is read.

    Args:
        config: Config of the model.
        dtype: Type of the weights.
        attn_implementation: Attention of transformers. Flash attention becomes `sdpa`, which keeps as much for the
            backward pass and runs anywhere.
        seed: Seed of the adapters' weights.
        trained: Which weights are trained; see `load_pretrained`.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = type(config) in AutoModelForImageTextToText._model_mapping
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    by_part = (
        attn_implementation if isinstance(attn_implementation, dict) else {"": attn_implementation}
    )
    attention = {
        part: "sdpa" if name.startswith("flash") else name for part, name in by_part.items()
    }
    model: PreTrainedModel = kind.from_config(
        config,
        dtype=getattr(torch, dtype),
        attn_implementation=attention.get("", attention),
    )
    with _weights_from(seed):
        choose_trained_weights(model, **trained)
    return model.eval()


def load_tokenizer(path: str, *, local_files_only: bool) -> PreTrainedTokenizerBase:
    """Load a tokenizer as its file describes it, even where transformers would replace it by a known model's own."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    declared = get_tokenizer_config(path, local_files_only=local_files_only).get("tokenizer_class")
    plain = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
    kind = PreTrainedTokenizerFast if plain else AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(
        path, local_files_only=local_files_only, trust_remote_code=False
    )
    return tokenizer
