"""Tiny random models of real architectures, with their processors, by the names of `families`.

Every type of layer is there, sliding windows are shorter than prompts, and weights are large enough for a token of
context to change a distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.models.families import FAMILIES
from support.models.family_processors import (
    gemma3_processor,
    gemma4_processor,
    internvl_processor,
    lfm2_vl_processor,
    llava_next_processor,
    llava_onevision_processor,
    qwen_processor,
    smolvlm_processor,
)
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    GenerationConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from ragen_pl.models.attention import pack_images
from ragen_pl.models.bundle import ModelBundle

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
HEADS = TEXT | {"head_dim": 8}
WINDOW = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
# the states of image tokens after a full layer are read by another layer
FULL_FIRST = {
    "num_hidden_layers": 3,
    "sliding_window": 7,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
EYES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
Text = dict[str, Any]


def _qwen2_5(text: Text, _: PreTrainedTokenizerFast) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**TEXT, **WINDOW, use_sliding_window=True, **text))


def _gemma3(text: Text, _: PreTrainedTokenizerFast) -> PreTrainedModel:
    return Gemma3ForCausalLM(Gemma3TextConfig(**HEADS, **WINDOW, **text))


def _gemma4_text(text: Text) -> Text:
    """Return the text config of E2B and E4B: keys and values of other layers, inputs for each layer."""
    layers = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return (
        HEADS
        | WINDOW
        | {"num_hidden_layers": 4, "layer_types": layers, "num_kv_shared_layers": 2, "global_head_dim": 16}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": text["vocab_size"]}
        | text
    )  # fmt: skip


def _gemma4(text: Text, _: PreTrainedTokenizerFast) -> PreTrainedModel:
    return Gemma4ForCausalLM(Gemma4TextConfig(**_gemma4_text(text)))


def _qwen3_5_text(text: Text) -> Text:
    linear = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    return HEADS | linear | {"layer_types": ["linear_attention", "full_attention"]} | text


def _qwen3_5(text: Text, _: PreTrainedTokenizerFast) -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_qwen3_5_text(text)))


def _lfm2(text: Text, _: PreTrainedTokenizerFast) -> PreTrainedModel:
    return Lfm2ForCausalLM(Lfm2Config(**TEXT, **text, layer_types=["conv", "full_attention"]))


def _marks(tokenizer: PreTrainedTokenizerFast, **names: str) -> dict[str, int]:
    """Return the ids of control tokens by the name of a config's key."""
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in names.items()}


def _qwen2_5_vl(text: Text, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
              "patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56}  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=TEXT | {"rope_parameters": MROPE} | text, vision_config=vision, **_qwen_marks(tokenizer)
        )
    )  # fmt: skip


def _phi3(text: Text, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    # half of each head is rotated, as in Phi-4-mini
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return Phi3ForCausalLM(Phi3Config(**TEXT, **text, sliding_window=7, rope_parameters=rotary))


def _qwen_marks(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return _marks(
        tokenizer, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>",
        vision_start_token_id="<|vision_start|>", vision_end_token_id="<|vision_end|>",
    )  # fmt: skip


def _qwen3_vl(text: Text, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    vision = {"depth": 3, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
              "patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}  # fmt: skip
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=HEADS | {"rope_parameters": MROPE} | text, vision_config=vision, **_qwen_marks(tokenizer)
        )
    )  # fmt: skip


def _qwen3_5_vl(text: Text, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    # a quarter of each head is rotated
    rotary = MROPE | {"partial_rotary_factor": 0.25, "mrope_interleaved": True}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
              "patch_size": 16, "num_position_embeddings": 64}  # fmt: skip
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config=_qwen3_5_text(text) | {"head_dim": 32, "rope_parameters": rotary}, vision_config=vision,
            **_qwen_marks(tokenizer),
        )
    )  # fmt: skip


def _gemma4_vl(text: Text, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return _gemma4_with_images(_gemma4_text(text), tokenizer)


def _gemma4_vl_experts(text: Text, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a model as 26B-A4B: experts, keys that are values, image tokens that attend to each other."""
    sizes = {
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    }
    experts = {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    }
    attention = {"attention_k_eq_v": True, "use_bidirectional_attention": "vision"}
    return _gemma4_with_images(HEADS | FULL_FIRST | sizes | experts | attention | text, tokenizer)


def _gemma4_with_images(text: Text, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    marks = _marks(
        tokenizer, boi_token_id="<|image>", eoi_token_id="<image|>", image_token_id="<|image|>",
        video_token_id="<|video|>", audio_token_id="<|audio|>", boa_token_id="<|audio>", eoa_token_index="<audio|>",
    )  # fmt: skip
    vision = EYES | {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "patch_size": 4,
        "position_embedding_size": 256,
    }
    return Gemma4ForConditionalGeneration(
        Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **marks)
    )


def _gemma3_vl(text: Text, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = Gemma3Config(
        text_config=HEADS | FULL_FIRST | text,
        vision_config=EYES | {"image_size": 32, "patch_size": 8, "vision_use_head": False},
        mm_tokens_per_image=4, boi_token_index=tokenizer.boi_token_id, eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id,
    )  # fmt: skip
    return Gemma3ForConditionalGeneration(config)


def _smolvlm(text: Text, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = SmolVLMConfig(
        text_config=TEXT | {"model_type": "llama"} | text, vision_config=EYES | {"image_size": 32, "patch_size": 8},
        scale_factor=2, image_token_id=tokenizer.image_token_id,
    )  # fmt: skip
    return SmolVLMForConditionalGeneration(config)


def _llava_next(text: Text, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = LlavaNextConfig(
        text_config=TEXT | {"model_type": "mistral", "sliding_window": 7} | text,
        vision_config=CLIPVisionConfig(**EYES, image_size=16, patch_size=8), vision_feature_layer=-1,
        image_grid_pinpoints=[[16, 32], [32, 16]], image_token_index=tokenizer.image_token_id,
    )  # fmt: skip
    return LlavaNextForConditionalGeneration(config)


def _llava_onevision(text: Text, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2"} | text,
        vision_config=EYES
        | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8, "vision_use_head": False},
        image_grid_pinpoints=[[16, 32], [32, 16]], image_token_index=tokenizer.image_token_id,
        video_token_index=tokenizer.video_token_id,
    )  # fmt: skip
    return LlavaOnevisionForConditionalGeneration(config)


def _internvl(text: Text, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"} | text,
        vision_config=EYES | {"image_size": [32, 32], "patch_size": [8, 8]}, image_seq_length=4,
        image_token_id=tokenizer.context_image_token_id,
    )  # fmt: skip
    return InternVLForConditionalGeneration(config)


def _lfm2_vl(text: Text, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = Lfm2VlConfig(
        text_config=TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]} | text,
        vision_config=EYES | {"model_type": "siglip2_vision_model", "patch_size": 8, "num_patches": 64},
        projector_hidden_size=32, image_token_id=tokenizer.image_token_id,
    )  # fmt: skip
    return Lfm2VlForConditionalGeneration(config)


Builder = Callable[[Text, PreTrainedTokenizerFast], PreTrainedModel]


@dataclass(frozen=True, kw_only=True)
class FamilyModel:
    """How a family's tiny model and processor are built.

    Attributes:
        model: returns the model from the text config's vocabulary and the tokenizer.
        processor: returns the processor; None for a text model.
        image_settings: keyword arguments of the processor's calls.
        recurrent: whether some layers keep a state instead of keys and values.
        single_image: whether a prompt may have one image only.
        family: the family whose tokenizer and template it has; None for that of its own name.
    """

    model: Builder
    processor: Callable[[PreTrainedTokenizerFast], ProcessorMixin] | None = None
    image_settings: dict[str, Any] | None = None
    recurrent: bool = False
    single_image: bool = False
    family: str | None = None


MODELS: dict[str, FamilyModel] = {
    "qwen2_5": FamilyModel(model=_qwen2_5),
    "qwen3": FamilyModel(model=lambda text, _: Qwen3ForCausalLM(Qwen3Config(**HEADS, **text))),
    "qwen3_5": FamilyModel(model=_qwen3_5, recurrent=True),
    "llama3_2": FamilyModel(model=lambda text, _: LlamaForCausalLM(LlamaConfig(**TEXT, **text))),
    "phi3": FamilyModel(model=_phi3),
    "smollm2": FamilyModel(model=lambda text, _: LlamaForCausalLM(LlamaConfig(**TEXT, **text))),
    "gemma3": FamilyModel(model=_gemma3),
    "gemma4": FamilyModel(model=_gemma4),
    "lfm2": FamilyModel(model=_lfm2, recurrent=True),
    "qwen2_5_vl": FamilyModel(
        model=_qwen2_5_vl, processor=qwen_processor(Qwen2_5_VLProcessor, Qwen2VLVideoProcessor)
    ),
    "qwen3_vl": FamilyModel(
        model=_qwen3_vl,
        processor=qwen_processor(Qwen3VLProcessor, Qwen3VLVideoProcessor, patch_size=16),
    ),
    "qwen3_5_vl": FamilyModel(
        model=_qwen3_5_vl,
        processor=qwen_processor(Qwen3VLProcessor, Qwen3VLVideoProcessor, patch_size=16),
        recurrent=True,
    ),
    "gemma4_vl": FamilyModel(model=_gemma4_vl, processor=gemma4_processor),
    "gemma4_vl_experts": FamilyModel(
        model=_gemma4_vl_experts, processor=gemma4_processor, family="gemma4_vl"
    ),
    "gemma3_vl": FamilyModel(model=_gemma3_vl, processor=gemma3_processor),
    "smolvlm": FamilyModel(model=_smolvlm, processor=smolvlm_processor),
    "llava_next": FamilyModel(model=_llava_next, processor=llava_next_processor),
    "llava_onevision": FamilyModel(
        model=_llava_onevision, processor=llava_onevision_processor, single_image=True
    ),
    "internvl": FamilyModel(
        model=_internvl, processor=internvl_processor, image_settings={"crop_to_patches": False}
    ),
    "lfm2_vl": FamilyModel(model=_lfm2_vl, processor=lfm2_vl_processor, recurrent=True),
}


def tiny(name: str) -> ModelBundle:
    """Return a family's tiny model with its tokenizer and processor, the same at every call."""
    kind = MODELS[name]
    family = FAMILIES[kind.family or name]
    tokenizer = family.tokenizer()
    text = {
        "vocab_size": len(tokenizer) + 3,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.model(text, tokenizer)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(torch.randn_like(parameter) * 2.0 * parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config = GenerationConfig(eos_token_id=family.eos_token_ids(tokenizer))
    processor = None if kind.processor is None else kind.processor(tokenizer)
    # as `load_pretrained` does
    pack_images(model)
    return ModelBundle(model.eval(), tokenizer, processor, kind.image_settings or {})
