"""Build the small models from their configs, and load pretrained models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from ragen_pl.base.checked import checked, needs_trust
from ragen_pl.base.constraints import Count, Open, Seed, TextOnly
from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.base.seeding import weights_seeded
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.settings import Attention, LoraSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ragen_pl.models.settings import DecoderSettings, VisionSettings


@needs_trust("text")
@checked
def build_small_vlm(
    *,
    vision: VisionSettings | None = None,
    text: Annotated[DecoderSettings, Open()] | None = None,
    seed: Seed = 0,
    prompt_format: PromptFormat = PromptFormat.FREE_THINK,
    words: Sequence[str] | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> ModelBundle:
    """Build the small vision-language model with weights drawn from `seed`.

    Args:
        vision: Changes to the encoder's settings, see `SmallVLMConfig`.
        text: Changes to the decoder's settings (`Qwen2Config`).
        seed: Seed of the weights; the global generators keep their states.
        prompt_format: Format of the responses; its tags besides think and answer become tokens.
        words: Words that become tokens, with and without a blank before them; None for none. A run gives those of its
            environment in place of None.
        dtype: Type of the weights.
    """
    from ragen_pl.models.small_vlm import (
        SmallVLMConfig,
        SmallVLMForConditionalGeneration,
        SmallVLMImageProcessor,
        SmallVLMProcessor,
    )
    from ragen_pl.models.small_vlm.token_pass import last_states
    from ragen_pl.models.small_vlm.tokenizer import CHAT_TEMPLATE, IMAGE, load_tokenizer

    tokenizer = load_tokenizer(prompt_format=PromptFormat(prompt_format), words=words or ())
    config = SmallVLMConfig(
        vision=dict(vision or {}),
        text_config=_ids(tokenizer) | dict(text or {}),
        image_token_id=tokenizer.get_vocab()[IMAGE],
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with weights_seeded(seed):
        model = SmallVLMForConditionalGeneration(config).to(getattr(torch, dtype))
    images = SmallVLMImageProcessor(
        patch_size=config.vision["patch_size"], max_cells=config.vision["max_cells"]
    )
    processor = SmallVLMProcessor(images, tokenizer, chat_template=CHAT_TEMPLATE)
    return ModelBundle(model.eval(), tokenizer, processor, token_pass=last_states)


@needs_trust("text")
@checked
def build_small_lm(
    *,
    text: Annotated[DecoderSettings, Open()] | None = None,
    seed: Seed = 0,
    prompt_format: PromptFormat = PromptFormat.FREE_THINK,
    words: Sequence[str] | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Annotated[ModelBundle, TextOnly()]:
    """Build a small language model for text environments.

    It has the sizes of the vision-language model's decoder. The architecture is Llama's, because transformers reads the
    tokenizer of any saved Qwen2 as Qwen's own.

    Args:
        text: Changes to the decoder's settings (`LlamaConfig`).
        seed: Seed of the weights; the global generators keep their states.
        prompt_format: Format of the responses; its tags besides think and answer become tokens.
        words: Words that become tokens, with and without a blank before them; None for none. A run gives those of its
            environment in place of None.
        dtype: Type of the weights.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from ragen_pl.models.small_vlm.configuration import TEXT
    from ragen_pl.models.small_vlm.token_pass import last_states
    from ragen_pl.models.small_vlm.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(prompt_format=PromptFormat(prompt_format), words=words or ())
    settings = TEXT | {"attention_bias": True} | _ids(tokenizer) | dict(text or {})
    with weights_seeded(seed):
        model = LlamaForCausalLM(LlamaConfig(**settings)).to(getattr(torch, dtype))
    return ModelBundle(model.eval(), tokenizer, token_pass=last_states)


def _ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }


@needs_trust("path", "revision", "lora.*_config", "lora.megatron_core")
@checked
def load_pretrained(
    path: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    attn_implementation: Literal["auto"] | Attention | dict[str, Attention] = "auto",
    local_files_only: bool = False,
    max_tokens: Count | None = None,
    image_processor: Annotated[dict[str, Any], Open()] | None = None,
    lora: Annotated[LoraSettings, Open()] | None = None,
    freeze_vision: bool | None = None,
    freeze_projector: bool | None = None,
    shows_images: bool = True,
    seed: Seed = 0,
) -> ModelBundle:
    """Load a language or vision-language model, its tokenizer and processor.

    Its dropout and noise are off (`ragen_pl.models.dropout`), and a rotary scaling that depends on the length is that
    of `max_tokens` (`ragen_pl.models.positions`).

    Args:
        path: Hugging Face folder, or name of a model on the hub.
        revision: Branch, tag or commit of a model on the hub; None for its main branch.
        trust_remote_code: Whether Python files of the model's repository are run where transformers has no such model.
        dtype: Type of the weights, such as `float32` or `bfloat16`.
        attn_implementation: Attention of transformers; a dictionary gives it by part of the model, such as
            `{"text_config": "sdpa", "vision_config": "flash_attention_2"}`. `auto` is `sdpa`, in one call for all
            windows of all images where the encoder has windows (`ragen_pl.models.attention`).
        local_files_only: Whether the hub is never asked.
        max_tokens: Tokens of the longest conversation; None for any up to the model's original length.
        image_processor: Settings of the family's image processor, such as `{"crop_to_patches": False}`; None
            for its own.
        lora: Settings of peft's `LoraConfig` to train adapters only; None trains all weights.
        freeze_vision: Whether the image encoder is left unchanged; None: with `lora`, or where no images are shown.
        freeze_projector: Whether the projector of image features is left unchanged; None: as for the encoder. It gets
            no adapters, but is trained itself.
        shows_images: Whether the environment shows images.
        seed: Seed of the adapters' weights; the global generators keep their states.

    Raises:
        FileNotFoundError: No model can be read there.
        ModuleNotFoundError: `lora` needs peft, which is not installed.
        ValueError: torch has no such `dtype`, peft refuses a setting, the model has no part to freeze, its attention
            can't mask as it needs, it has too few positions, or transformers does not know it.
    """
    from ragen_pl.models.adapters import choose_trained_weights
    from ragen_pl.models.attention import pack_images
    from ragen_pl.models.pretrained import (
        adapt_config,
        adapt_model,
        check_family,
        check_image_settings,
        load_tokenizer,
        log_once,
        present_image_settings,
        read_config,
        read_model,
        sees_images,
    )

    weights = getattr(torch, dtype, None)
    if not isinstance(weights, torch.dtype):
        raise ValueError(f"model.build.dtype={dtype}: expected float32, bfloat16 or float16")
    where: dict[str, Any] = {
        "local_files_only": local_files_only or Path(path).is_dir(),
        "trust_remote_code": trust_remote_code,
    }
    if revision is not None:
        where["revision"] = revision
    config = read_config(path, where)
    notes = adapt_config(config, max_tokens=max_tokens)
    attention = "sdpa" if attn_implementation == "auto" else attn_implementation
    model = read_model(config, path, attention, where | {"dtype": weights})
    if attn_implementation == "auto":
        pack_images(model)
    notes += adapt_model(model, max_tokens=max_tokens)
    processor = None
    if sees_images(config):
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(path, **where)
        check_image_settings(processor, image_processor or {})
        image_processor = present_image_settings(processor.image_processor, image_processor or {})
    tokenizer = load_tokenizer(path, **where) if processor is None else processor.tokenizer
    with weights_seeded(seed):
        choose_trained_weights(
            model,
            lora=lora,
            freeze_vision=freeze_vision,
            freeze_projector=freeze_projector,
            shows_images=shows_images,
        )
    bundle = ModelBundle(model.eval(), tokenizer, processor, image_processor or {}, source=path)
    check_family(bundle, shows_images=shows_images)
    for note in notes:
        log_once(path, note)
    return bundle
