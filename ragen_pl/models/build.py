"""Build the small models from their configs, and load pretrained models."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from ragen_pl.base.checked import checked, needs_trust
from ragen_pl.base.constraints import Count, Open, Seed, TextOnly
from ragen_pl.base.prompt_formats import PromptFormat
from ragen_pl.models.adapters import LoraSettings, choose_trained_weights
from ragen_pl.models.attention import pack_images
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.dropout import switch_dropout_off, switch_modules_off
from ragen_pl.models.positions import check_length, fix_rotary_scaling
from ragen_pl.models.pretrained import (
    check_image_settings,
    load_tokenizer,
    model_class,
    present_image_settings,
    read_config,
    read_model,
    sees_images,
)
from ragen_pl.models.settings import Attention

if TYPE_CHECKING:
    from transformers import (
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

    from ragen_pl.models.settings import DecoderSettings, VisionSettings

log = logging.getLogger(__name__)


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
    with _weights_from(seed):
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
    with _weights_from(seed):
        model = LlamaForCausalLM(LlamaConfig(**settings)).to(getattr(torch, dtype))
    return ModelBundle(model.eval(), tokenizer, token_pass=last_states)


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
    notes = _prepare(config, max_tokens=max_tokens)
    attention = "sdpa" if attn_implementation == "auto" else attn_implementation
    model = read_model(config, path, attention, where | {"dtype": weights})
    if attn_implementation == "auto":
        pack_images(model)
    notes += _finish(model, max_tokens=max_tokens)
    processor = None
    if sees_images(config):
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(path, **where)
        check_image_settings(processor, image_processor or {})
        image_processor = present_image_settings(processor.image_processor, image_processor or {})
    tokenizer = load_tokenizer(path, **where) if processor is None else processor.tokenizer
    with _weights_from(seed):
        choose_trained_weights(
            model,
            lora=lora,
            freeze_vision=freeze_vision,
            freeze_projector=freeze_projector,
            shows_images=shows_images,
        )
    bundle = ModelBundle(model.eval(), tokenizer, processor, image_processor or {}, source=path)
    _check_family(bundle, shows_images=shows_images)
    for note in notes:
        _log_once(path, note)
    return bundle


def _prepare(config: PretrainedConfig, *, max_tokens: int | None) -> list[str]:
    """Adapt a config to RL, and return a line on each change."""
    scaled = fix_rotary_scaling(config, max_tokens=max_tokens)
    return [*([] if scaled is None else [scaled]), *_switched_off(switch_dropout_off(config))]


def _finish(model: PreTrainedModel, *, max_tokens: int | None) -> list[str]:
    """Adapt a model to RL, and return a line on each change.

    Raises:
        ValueError: It has too few positions.
    """
    long = check_length(model, max_tokens=max_tokens)
    return [*([] if long is None else [long]), *_switched_off(switch_modules_off(model))]


def _switched_off(values: Mapping[str, float]) -> list[str]:
    if not values:
        return []
    named = ", ".join(f"{name}={value:g}" for name, value in values.items())
    return [f"dropout and noise are off, as in rollouts: 0 instead of {named}"]


def _check_family(bundle: ModelBundle, *, shows_images: bool) -> None:
    """Check that conversations of several turns can be computed with a family's attention and images.

    Raises:
        ValueError: They can't.
    """
    facts = bundle.facts
    # a ValueError where they are not known
    _ = bundle.layers
    if bundle.model.config.is_encoder_decoder:
        raise ValueError(
            f"model.build.path={bundle.source}: in {facts.family} an encoder reads the prompt, and every turn would be "
            "a prompt of its own; choose another family"
        )
    if not facts.takes_cache:
        raise ValueError(
            f"model.build.path={bundle.source}: transformers' {facts.family} takes no keys, values or states of "
            "earlier turns; choose another family"
        )
    if not facts.takes_positions and not facts.keeps_states:
        raise ValueError(
            f"model.build.path={bundle.source}: transformers' {facts.family} takes no positions, so those of a short "
            "conversation would count the padding beside a long one; choose another family"
        )
    if by_call := facts.layers_by_call:
        raise ValueError(
            f"model.build.path={bundle.source}: in {facts.family} layers ({', '.join(sorted(by_call))}) read a prompt "
            "otherwise than a response, so log-probs of a token depend on what was sampled; choose another family"
        )
    if facts.attends_both_ways:
        raise ValueError(
            f"model.build.path={bundle.source}: in {facts.family} the tokens of a prompt, or of its images and what "
            "precedes them, attend to each other both ways, so a next turn would change the ones before; choose "
            "another family"
        )
    if facts.bidirectional_layers and not facts.masks_by_function:
        raise ValueError(
            f"model.build.attn_implementation: in {type(bundle.model).__name__} the tokens of an image attend to each "
            "other, which flash attention can't do; set sdpa, or {text_config: sdpa, vision_config: flash_attention_2}"
        )
    if bundle.processor is not None and shows_images:
        _check_images(bundle)


def _check_images(bundle: ModelBundle) -> None:
    """Check that images are encoded once and are read in whichever turn they are shown.

    Raises:
        ValueError: They can't.
    """
    facts = bundle.facts
    if facts.image_token_id is None:
        raise ValueError(
            f"model.build.path={bundle.source}: the config of {facts.family} names no token of images; choose another "
            "family"
        )
    if not facts.takes_features:
        raise ValueError(
            f"model.build.path={bundle.source}: transformers' {facts.family} takes no encoded images, and every turn "
            "would encode all of them again; choose another family"
        )
    if facts.position_axes > 3:
        raise ValueError(
            f"model.build.path={bundle.source}: in {facts.family} positions have {facts.position_axes} axes, one of "
            "which numbers the images of all rows, so a turn can't be computed by itself; choose another family"
        )


@cache
def _log_once(path: str, note: str) -> None:
    """Log a line on a model once in a run: a critic may have the same model, and ranks have."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        log.info("model.build.path=%s: %s", path, note)


def describe_pretrained(
    config: PretrainedConfig,
    *,
    dtype: str = "float32",
    attn_implementation: str | dict[str, str] = "auto",
    max_tokens: int | None = None,
    seed: int = 0,
    **trained: Any,
) -> PreTrainedModel:
    """Build the model that `load_pretrained` would load, with new weights. Nothing is read.

    Args:
        config: Config of the model, changed as `load_pretrained` changes it.
        dtype: Type of the weights.
        attn_implementation: Attention of transformers. Flash attention becomes `sdpa`, which keeps as much for the
            backward pass and runs anywhere.
        max_tokens: Tokens of the longest conversation.
        seed: Seed of the adapters' weights.
        trained: Which weights are trained; see `load_pretrained`.
    """
    _prepare(config, max_tokens=max_tokens)
    by_part = (
        attn_implementation if isinstance(attn_implementation, dict) else {"": attn_implementation}
    )
    attention = {
        part: "sdpa" if name == "auto" or name.startswith("flash") else name
        for part, name in by_part.items()
    }
    model: PreTrainedModel = model_class(config).from_config(
        config,
        dtype=getattr(torch, dtype),
        attn_implementation=attention.get("", attention),
    )
    if attn_implementation == "auto":
        pack_images(model)
    _finish(model, max_tokens=max_tokens)
    with _weights_from(seed):
        choose_trained_weights(model, **trained)
    return model.eval()
