"""Tiny random models of transformers' families, with processors for those that see images.

A config's sizes are set by their names, wherever a family has them. What a family needs beyond is in `SETTINGS`, and
the processors of families with images in `PROCESSORS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from support.models.families import INTERNVL
from support.models.family_tokenizers import TOKENIZERS
from tokenizers import AddedToken
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.dropout import switch_dropout_off, switch_modules_off
from ragen_pl.models.pretrained import check_family, model_class, sees_images

# control tokens of any family with images, by attribute of the tokenizer
MARKS = {
    "image_token": "<image>", "video_token": "<video>", "audio_token": "<audio>", "boi_token": "<boi>",
    "eoi_token": "<eoi>", "image_start_token": "<img>", "image_end_token": "</img>", "video_start_token": "<vid>",
    "video_end_token": "</vid>", "vision_bos_token": "<img>", "vision_eos_token": "</img>", "audio_bos_token": "<aud>",
    "audio_eos_token": "</aud>", "img_line_break_token": "<line>", "slice_start_token": "<slice>",
    "slice_end_token": "</slice>", "image_id_start_token": "<id>", "image_id_end_token": "</id>",
    "image_boundary_token": "<fake>", "start_image_token": "<img>", "end_image_token": "</img>",
    "context_image_token": "<image>", "image_break_token": "<line>",
}  # fmt: skip
CONTROL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", *MARKS.values(), "<IMG_START>", "<IMG_END>", "<IMG_ATOM>",
    "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>",
    "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL", "<imgpad>", "]<]image[>[", "]<]video[>[", "]<]start of image[>[",
    "]<]end of image[>[", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>", "<im_patch>", "<im_start>",
    "<im_end>", "<patch_newline>", "<global-img>", "<fake_token_around_image>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)  # fmt: skip

WIDTH, HEADS = 32, 4
DECODER: dict[str, Any] = {
    "hidden_size": WIDTH, "n_embd": WIDTH, "d_model": WIDTH, "dim": WIDTH, "embedding_size": WIDTH,
    "word_embed_proj_dim": WIDTH, "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "dff": 48,
        "ffn_hidden_size": 48,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2,
    "num_attention_heads": HEADS, "n_head": HEADS, "n_heads": HEADS, "num_heads": HEADS,
        "decoder_attention_heads": HEADS,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "max_position_embeddings": 2048, "n_positions": 2048,
    "n_ctx": 2048, "max_seq_len": 2048,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_top_k": 2, "moe_topk": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "num_shared_experts": 1, "num_kv_shared_layers": 0,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "ssm_state_size": 8, "state_size": 8, "time_step_rank": 4, "mamba_dt_rank": 4,
    "mamba_d_ssm": 64, "sliding_window": 7, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "lru_width": WIDTH,
    "attention_window_size": 7, "block_size": 8, "rotary_dim": 4, "dim_head": 8, "dim_ff": 48,
}  # fmt: skip
EYES: dict[str, Any] = {
    "hidden_size": 16, "embed_dim": 16, "intermediate_size": 24, "depth": 2, "num_hidden_layers": 2, "num_layers": 2,
    "num_attention_heads": 2, "num_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "image_size": 32,
    "patch_size": 8, "out_hidden_size": WIDTH, "output_dim": WIDTH, "vision_use_head": False, "num_global_layers": 1,
    "projection_dim": WIDTH,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MROPE = ROPE | {"mrope_section": [2, 1, 1]}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
PATCHES = {"patch_size": 14}
QWEN_EYES = {"patch_size": 16, "num_position_embeddings": 64}
PIXTRAL = {"spatial_merge_size": 2, "vision_config": {"patch_size": 8, "image_size": 64, "hidden_size": 16,
           "num_attention_heads": 2, "head_dim": 8}}  # fmt: skip
MINICPM = {
    "text_config": LINEAR | {"model_type": "qwen3_5_text", "num_attention_heads": 4, "head_dim": 16},
    "vision_config": PATCHES | {"image_size": 112, "insert_layer_id": 0}, "insert_layer_id": 0,
}  # fmt: skip
INKLING = {"swa_num_attention_heads": HEADS, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 7,
           "d_rel": 4, "layer_types": ["hybrid_sliding", "hybrid"]}  # fmt: skip
TILES = [[32, 64], [64, 32]]


def fields_of(kind: type[PretrainedConfig]) -> set[str]:
    """Return the names of a config's keys."""
    return {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)


def sizes(kind: type[PretrainedConfig], *, small: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return small values for a config's keys, and for those of its parts."""
    names = fields_of(kind)
    values = {key: value for key, value in (small or DECODER).items() if key in names}
    if "kv_lora_rank" in names:
        # latent attention has keys and values for each head
        values |= {key: HEADS for key in ("num_key_value_heads",) if key in names}
    for part, part_kind, known in parts_of(kind):
        vision = "text" not in part and "decoder" not in part
        values[part] = known | sizes(part_kind, small=EYES if vision else DECODER)
    return values


def parts_of(
    kind: type[PretrainedConfig],
) -> Iterator[tuple[str, type[PretrainedConfig], dict[str, Any]]]:
    """Yield the parts of a config: key, kind and keyword arguments of the default."""
    if not hasattr(kind, "sub_configs_defaults"):  # before transformers 5.20
        default = kind() if kind.sub_configs else None
        for part in kind.sub_configs:
            part_kind = type(getattr(default, part))
            yield part, part_kind, {"model_type": part_kind.model_type}
        return
    for part, spec in kind.sub_configs_defaults.items():
        name = spec.model_type or spec.config_class.model_type
        part_kind = CONFIG_MAPPING[name] if spec.model_type else spec.config_class
        yield part, part_kind, (spec.init_kwargs or {}) | {"model_type": name}


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return values with changes, those of parts key by key; a part with another model type is replaced."""
    result = dict(values)
    for key, change in changes.items():
        old = result.get(key)
        if isinstance(change, dict) and isinstance(old, dict):
            kind = change.get("model_type", old.get("model_type"))
            if kind != old.get("model_type"):
                vision = "text" not in key
                old = sizes(CONFIG_MAPPING[kind], small=EYES if vision else DECODER)
            result[key] = old | change
        else:
            result[key] = change
    return result


def tokenizer(slot: str = "<image>", **marks: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of some hundred tokens with the control tokens of all families.

    Args:
        slot: What the template writes for an image.
        marks: Control tokens in place of those of `MARKS`.
    """
    made = TOKENIZERS["smollm2"](
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=MARKS | marks,
        chat_template=INTERNVL.replace("<IMG_CONTEXT>", slot),
    )
    made.add_tokens([AddedToken(token, special=True) for token in dict.fromkeys(CONTROL)])
    return made


def token_ids(
    words: PreTrainedTokenizerFast, names: set[str], marks: dict[str, str]
) -> dict[str, int]:
    """Return the ids of control tokens by the names of a config's keys."""
    ids = {f"{name}_id": words.convert_tokens_to_ids(token) for name, token in marks.items()}
    ids |= {key.replace("_id", "_index"): value for key, value in ids.items()}
    ids |= {
        "vision_start_token_id": ids["vision_bos_token_id"],
        "vision_end_token_id": ids["vision_eos_token_id"],
        "boi_token_id": ids["boi_token_id"],
    }
    return {key: value for key, value in ids.items() if key in names}


SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "bailing_hybrid": {"layer_group_size": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
              "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": HEADS},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 4,
               "chunk_size": 8, "num_key_value_heads": HEADS},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_groups": 1,
                   "chunk_size": 8, "moe_shared_expert_intermediate_size": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 7},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "inkling2_text": INKLING | {"n_layers_per_attn_res_block": 1},
    "inkling2": {"text_config": INKLING | {"n_layers_per_attn_res_block": 1},
                 "vision_config": {"text_hidden_size": WIDTH, "patch_size": 20, "projection_hidden_dim": 16}},
    "mistral4": {"first_k_dense_replace": 0, "num_key_value_heads": HEADS},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "qwen3_next": LINEAR | {"num_attention_heads": 4},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5": {"text_config": LINEAR},
    "qwen3_5_moe": {"text_config": LINEAR},
    "qwen4_exp_text": LINEAR,
    "qwen4_exp": {"text_config": LINEAR},
    "kimi_linear": LINEAR,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    **{
        name: {"text_config": {"rope_parameters": MROPE}, "vision_config": PATCHES}
        for name in ("qwen2_5_vl", "glm4v", "glm46v", "glm_ocr", "glmga", "paddleocr_vl")
    },
    "qwen2_vl": {"text_config": {"rope_parameters": MROPE}, "vision_config": PATCHES | {"hidden_size": WIDTH}},
    "qwen3_vl_moe": {"text_config": {"rope_parameters": MROPE},
                     "vision_config": QWEN_EYES | {"deepstack_visual_indexes": [0, 1]}},
    "glm4v_moe": {"text_config": {"rope_parameters": MROPE | {"mrope_section": [1, 1, 0]}}, "vision_config": PATCHES},
    **{
        name: {"vision_config": PATCHES | {"fullatt_block_indexes": [1], "window_size": 56}}
        for name in ("exaone4_5", "hyperclovax_vision_v2")
    },
    "lfm3_vl": {"vision_config": PATCHES},
    "minimax_m3_vl": {"vision_config": PATCHES},
    "cohere_compass": {
        "text_config": {"layer_types": ["full_attention"] * 2, "rope_parameters": {"full_attention": MROPE}},
        "vision_config": QWEN_EYES | PATCHES | {"deepstack_visual_indexes": [0, 1]},
    },
    "cosmos3_edge": {"text_config": {"rope_parameters": MROPE}, "vision_config": {"patch_size": 16},
                     "projector_hidden_size": 64},
    "kimi_k25": {"projection_hidden_size": 16,
                 "vision_config": PATCHES | {"pos_emb_height": 8, "pos_emb_width": 8}},
    "muse_glimmer": {
        "text_config": {"layer_types": ["sliding_attention", "full_attention"], "layer_rope_theta": [1e4, 0]},
        "vision_config": PATCHES | {"layer_types": ["window_attention", "full_attention"], "pos_emb_height": 8,
                                    "pos_emb_width": 8},
        "out_hidden_size": 64, "projector_hidden_size": 24,
    },
    "step3p7": {
        "text_config": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7,
                        "mlp_layer_types": ["dense", "sparse"], "num_sliding_attention_heads": HEADS,
                        "share_expert_dim": 16,
                        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE)},
        "vision_config": {"image_size": 64, "max_position_embeddings": 64},
    },
    "inkling_mm_model": {
        "text_config": INKLING | {"mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {"text_hidden_size": WIDTH, "patch_size": 40}, "audio_config": {"text_hidden_size": WIDTH},
    },
    "mistral3": PIXTRAL, "mistral_large4": PIXTRAL, "lighton_ocr": PIXTRAL,
    "llava_next_video": {"vision_config": {"image_size": 16}, "vision_feature_layer": -1,
                         "image_grid_pinpoints": [[16, 32], [32, 16]]},
    "vipllava": {"vision_feature_layer": [-1, -2]},
    "aria": {"vision_config": {"image_size": 490, "patch_size": 98}, "projector_patch_to_query_dict": {25: 4}},
    "idefics3": {"scale_factor": 2},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"image_size": 64, "window_size": 4, "global_attn_indexes": [1],
                           "output_channels": 16, "mlp_dim": 24}},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "hidden_size": 32, "expand": 2, "chunk_size": 8},
    "ernie4_5_vl_moe": {
        "text_config": {"rope_parameters": MROPE | {"mrope_section": [1, 1, 2]}, "moe_intermediate_size": [16, 16],
            "moe_num_shared_experts": 1,
                        "mlp_layer_types": ["sparse", "sparse"]},
        "vision_config": {"patch_size": 14, "hidden_size": 16},
    },
    "aya_vision": {
        "text_config": {"model_type": "cohere2"}, "vision_config": {"model_type": "siglip_vision_model"},
        "downsample_factor": 2, "adapter_layer_norm_eps": 1e-6,
    },
    "cohere2_vision": {
        "text_config": {"model_type": "cohere2"}, "vision_config": {"model_type": "siglip_vision_model"},
        "downsample_factor": 2, "alignment_intermediate_size": 32,
    },
    "granite_vision": {
        "text_config": {"model_type": "granite", "logits_scaling": 6.0},
        "vision_config": {"model_type": "clip_vision_model", "image_size": 16}, "vision_feature_layer": -1,
        "image_grid_pinpoints": [[16, 32], [32, 16]],
    },
    "hyperclovax": {"logits_scaling": 0.3},
    "deepseek_vl": {"text_config": {"model_type": "llama"}},
    "janus": {"text_config": {"model_type": "llama"}, "vision_config": {"num_image_tokens": 16, "mlp_ratio": 2.0,
              "projection_dim": WIDTH}, "vq_config": {"embed_dim": 16, "num_embeddings": 32, "base_channels": 32,
              "channel_multiplier": [1, 1], "num_res_blocks": 1, "projection_dim": WIDTH,
                  "image_token_embed_dim": WIDTH}},
    "qwen2_5_omni_thinker": {
        "text_config": {"rope_parameters": MROPE, "sliding_window": None},
        "vision_config": {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56},
        "audio_config": {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
                         "output_dim": WIDTH, "num_mel_bins": 8},
    },
    "qwen3_omni_moe_thinker": {
        "text_config": {"rope_parameters": MROPE | {"mrope_interleaved": True}, "sliding_window": None},
        "vision_config": {"patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        "audio_config": {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
                         "output_dim": WIDTH, "num_mel_bins": 8, "downsample_hidden_size": 8},
    },
    "granite_docling": {"vision_config": {"scale_factor": 2}},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2",
        "image_grid_pinpoints": TILES, "vision_feature_select_strategy": "full",
        # a head of the projector has 64 dimensions
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 64},
        "qformer_config": {"intermediate_size": 16},
    },
    "perception_lm": {
        "text_config": {"model_type": "llama"}, "projector_pooling_ratio": 2, "vision_use_cls_token": True,
        "vision_config": {"architecture": "vit_pe_core_large_patch14_336", "model_args": {
            "embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": [32, 32], "patch_size": [8, 8], "global_pool": "",
            "use_post_transformer_norm": False, "init_values": 0.1, "ref_feat_shape": [4, 4]}},
    },
    "ovis2": {"visual_indicator_token_ids": [300, 301, 302, 303, 304], "text_config": {"model_type": "qwen2"},
        "vision_config": {"hidden_stride": 2, "vocab_size": 64},
              "hidden_size": WIDTH},
    "idefics2": {"text_config": {"model_type": "mistral"}, "vision_config": {"image_size": 32},
                 "perceiver_config": {"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
                                      "resampler_head_dim": 8, "num_key_value_heads": 1, "hidden_size": WIDTH}},
    "video_llama_3": {"text_config": {"model_type": "qwen2"}, "vision_config": {"patch_size": 14}},
    "minicpmv4_6": MINICPM | {"image_size": 112}, "minicpmv4_7": MINICPM | {"image_size": 112}, "minicpm_ocr": MINICPM,
    "hunyuan_vl": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                       "mrope_section": [1, 1, 1, 1]}}},
    "got_ocr2": {"text_config": {"model_type": "qwen2"}, "vision_config": {"image_size": 64, "mlp_dim": 24,
                 "window_size": 4, "global_attn_indexes": [1], "output_channels": 16, "patch_size": 8}},
    "llama4": {"text_config": {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 48, "attention_chunk_size": 64,
               "no_rope_layers": [1, 0]},
               "vision_config": {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": WIDTH}},
}  # fmt: skip
# what the template writes for an image, where it is more than the image token
SLOTS = {"qwen2_5_omni_thinker": "<img><image></img>", "qwen3_omni_moe_thinker": "<img><image></img>",
         "llama4": "<|image|>", "got_ocr2": "<imgpad>", "minimax_m3_vl": "]<]image[>[", "muse_glimmer": "<|patch|>",
         "step3p7": "<im_patch>", "cohere_compass": "<|IMAGE_PAD|>"}  # fmt: skip
# the token of a feature, where it is not that of the slot
FEATURES = {"aya_vision": "<|IMG_PATCH|>", "ovis2": "<IMG_ATOM>", "minimax_m3_vl": "]<]image[>[",
            "muse_glimmer": "<|patch|>", "step3p7": "<im_patch>"}  # fmt: skip
# keyword arguments of processors that let a prompt grow by an image
IMAGE_SETTINGS: dict[str, dict[str, Any]] = {
    **{key: {"use_image_id": False} for key in ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr")},
    "aria": {"max_image_size": 490},
}
# control tokens that a processor names itself
NAMED = {"cohere_compass": {"image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>"}}
# keys that the hub's files have and the config's class does not
EXTRA = {
    "qwen2_5_omni_thinker": {"vision_start_token_id"},
    "qwen3_omni_moe_thinker": {"vision_start_token_id"},
}
# the family's class, where its name in SETTINGS is not the config's
KINDS = {"granite_vision": "llava_next"}


def image_size(images: Any) -> Any:
    return {"height": 32, "width": 32} if images is None else images


Builder = Callable[[PreTrainedTokenizerFast, PretrainedConfig], ProcessorMixin]


def built(
    name: str,
    images: str,
    sizes: dict[str, Any],
    *,
    video: str | None = None,
    audio: bool = False,
    **settings: Any,
) -> Builder:
    """Return the builder of a processor.

    Args:
        name: Class of the processor.
        images: Class of its image processor.
        sizes: Settings of the image processor.
        video: Class of its video processor.
        audio: Whether it has one of audio.
        settings: Settings of the processor.
    """

    def build(words: PreTrainedTokenizerFast, _: PretrainedConfig) -> ProcessorMixin:
        parts: dict[str, Any] = {"image_processor": getattr(transformers, images)(**sizes)}
        if video is not None:
            parts["video_processor"] = getattr(transformers, video)()
        if audio:
            parts["feature_extractor"] = transformers.WhisperFeatureExtractor(feature_size=8)
        made: ProcessorMixin = getattr(transformers, name)(
            **parts, tokenizer=words, chat_template=words.chat_template, **settings
        )
        return made

    return build


SQUARE = {"size": {"height": 32, "width": 32}}
PIXELS = {"size": {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}}
CROPS = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
LLAVA = {
    "patch_size": 8,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
PIXTRAL_IMAGES = {"patch_size": {"height": 8, "width": 8}, "size": {"longest_edge": 64}}
PIXTRAL_TOKENS = {"patch_size": 8, "spatial_merge_size": 2, "image_token": "<image>", "image_break_token": "<line>",
                  "image_end_token": "</img>"}  # fmt: skip


def of_qwen(
    name: str,
    images: str = "Qwen2VLImageProcessor",
    video: str = "Qwen2VLVideoProcessor",
    **changes: Any,
) -> Builder:
    """Return the builder of a processor as Qwen2-VL's, with these settings of its image processor."""
    return built(name, images, PIXELS | changes, video=video)


PROCESSORS: dict[str, Builder] = {
    "qwen2_vl": of_qwen("Qwen2VLProcessor"),
    "qwen3_vl_moe": of_qwen("Qwen3VLProcessor", video="Qwen3VLVideoProcessor", patch_size=16),
    "exaone4_5": of_qwen("Exaone4_5_Processor"),
    "hyperclovax_vision_v2": of_qwen("HyperCLOVAXVisionV2Processor"),
    "lfm3_vl": of_qwen("Lfm3VlProcessor"),
    "glm4v": of_qwen("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
    "glm4v_moe": of_qwen("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
    "glm46v": of_qwen("Glm46VProcessor", "Glm46VImageProcessor", "Glm46VVideoProcessor"),
    "glmga": of_qwen("Glm46VProcessor", "GlmgaImageProcessor", "Glm46VVideoProcessor"),
    "glm_ocr": of_qwen("Glm46VProcessor", "Glm46VImageProcessor", "Glm46VVideoProcessor"),
    "cohere_compass": of_qwen("CohereCompassProcessor", "CohereCompassImageProcessor", "CohereCompassVideoProcessor"),
    "cosmos3_edge": of_qwen("Cosmos3EdgeProcessor", "Cosmos3EdgeImageProcessor", "Cosmos3EdgeVideoProcessor"),
    "minimax_m3_vl": of_qwen("MiniMaxM3VLProcessor", "MiniMaxM3VLImageProcessor", "MiniMaxM3VLVideoProcessor"),
    "kimi_k25": built(
        "Kimi_K25Processor", "Kimi_K25ImageProcessor", {"max_patches": 36}, video="Kimi_K25VideoProcessor"
    ),
    "muse_glimmer": built(
        "MuseGlimmerProcessor", "MuseGlimmerImageProcessor", {"max_image_tokens": 16}, video="MuseGlimmerVideoProcessor"
    ),
    "paddleocr_vl": built("PaddleOCRVLProcessor", "PaddleOCRVLImageProcessor", PIXELS),
    "mistral3": built("PixtralProcessor", "PixtralImageProcessor", PIXTRAL_IMAGES, **PIXTRAL_TOKENS),
    "mistral_large4": built("PixtralProcessor", "PixtralImageProcessor", PIXTRAL_IMAGES, **PIXTRAL_TOKENS),
    "lighton_ocr": built(
        "LightOnOcrProcessor", "PixtralImageProcessor", PIXTRAL_IMAGES, patch_size=8, spatial_merge_size=2
    ),
    "llava": built("LlavaProcessor", "LlavaImageProcessor", CROPS, **LLAVA),
    "vipllava": built("LlavaProcessor", "CLIPImageProcessor", CROPS, **LLAVA),
    "llava_next_video": built(
        "LlavaNextVideoProcessor", "LlavaNextImageProcessor",
        {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16},
         "image_grid_pinpoints": [[16, 32], [32, 16]]},
        video="LlavaNextVideoVideoProcessor", **LLAVA,
    ),
    "video_llava": built(
        "VideoLlavaProcessor", "VideoLlavaImageProcessor", CROPS, video="VideoLlavaVideoProcessor", patch_size=8
    ),
    "aria": built(
        "AriaProcessor", "AriaImageProcessor", {"max_image_size": 490, "min_image_size": 32}, size_conversion={490: 4}
    ),
    "idefics3": built(
        "Idefics3Processor", "Idefics3ImageProcessor",
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}, image_seq_len=4,
    ),
    "deepseek_vl_hybrid": built(
        "DeepseekVLHybridProcessor", "DeepseekVLHybridImageProcessor",
        SQUARE | {"high_res_size": {"height": 64, "width": 64}}, num_image_tokens=16,
    ),
    "qianfan_ocr": built("QianfanOCRProcessor", "GotOcr2ImageProcessor", SQUARE, image_seq_length=4),
    "mllama": built("MllamaProcessor", "MllamaImageProcessor", SQUARE),
    "paligemma": built("PaliGemmaProcessor", "SiglipImageProcessor", SQUARE),
    "minicpm_ocr": built(
        "MiniCPMOcrProcessor", "MiniCPMOcrImageProcessor", {"scale_resolution": 112, "max_slice_nums": 1},
        video="MiniCPMV4_6VideoProcessor",
    ),
    "minicpmv4_7": built(
        "MiniCPMV4_7Processor", "MiniCPMV4_6ImageProcessor", {"scale_resolution": 112, "max_slice_nums": 1},
        video="MiniCPMV4_6VideoProcessor",
    ),
    "step3p7": built(
        "Step3p7Processor", "Step3p7ImageProcessor",
        {"size": {"height": 64, "width": 64}, "patch_size": 64, "vision_patch_size": 8, "max_image_size": 64},
    ),
    "inkling2": built("Inkling2Processor", "Inkling2ImageProcessor", {}, image_token="<image>"),
    "inkling_mm_model": built(
        "InklingProcessor", "InklingImageProcessor", {}, audio=True, image_token="<image>", audio_token="<audio>",
        image_bos_token="<img>", audio_bos_token="<aud>",
    ),
    "ernie4_5_vl_moe": built(
        "Ernie4_5_VLMoeProcessor", "Ernie4_5_VLMoeImageProcessor",
        PIXELS, video="Ernie4_5_VLMoeVideoProcessor",
    ),
    "aya_vision": built(
        "AyaVisionProcessor", "GotOcr2ImageProcessor", SQUARE, patch_size=8, img_size=32, downsample_factor=2,
    ),
    "cohere2_vision": built(
        "Cohere2VisionProcessor", "Cohere2VisionImageProcessor", SQUARE | {"patch_size": 2},
    ),
    "granite_vision": built(
        "LlavaNextProcessor", "LlavaNextImageProcessor",
        {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16},
         "image_grid_pinpoints": [[16, 32], [32, 16]]},
        patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
    ),
    "deepseek_vl": built("DeepseekVLProcessor", "DeepseekVLImageProcessor", SQUARE, num_image_tokens=16),
    "janus": built("JanusProcessor", "JanusImageProcessor", SQUARE, num_image_tokens=16),
    "perception_lm": built(
        "PerceptionLMProcessor", "PerceptionLMImageProcessor",
        {"tile_size": 32, "vision_input_type": "vanilla", "size": {"height": 32, "width": 32}},
        video="PerceptionLMVideoProcessor", patch_size=8, pooling_ratio=2,
    ),
    "qwen2_5_omni_thinker": built(
        "Qwen2_5OmniProcessor", "Qwen2VLImageProcessor", PIXELS, video="Qwen2VLVideoProcessor", audio=True,
    ),
    "qwen3_omni_moe_thinker": built(
        "Qwen3OmniMoeProcessor", "Qwen2VLImageProcessor", PIXELS | {"patch_size": 16},
        video="Qwen2VLVideoProcessor", audio=True,
    ),
    "ovis2": built("Ovis2Processor", "Ovis2ImageProcessor", SQUARE | {"crop_to_patches": False}, image_seq_length=4),
    "idefics2": built(
        "Idefics2Processor", "Idefics2ImageProcessor", {"size": {"shortest_edge": 16, "longest_edge": 32}},
        image_seq_len=4,
    ),
    "hunyuan_vl": built("HunYuanVLProcessor", "HunYuanVLImageProcessor", PIXELS),
    "video_llama_3": built(
        "VideoLlama3Processor", "VideoLlama3ImageProcessor", PIXELS, video="VideoLlama3VideoProcessor",
    ),
    "minicpmv4_6": built(
        "MiniCPMV4_6Processor", "MiniCPMV4_6ImageProcessor", {"scale_resolution": 112, "max_slice_nums": 1},
            video="MiniCPMV4_6VideoProcessor",
    ),
    "got_ocr2": built("GotOcr2Processor", "GotOcr2ImageProcessor", {"size": {"height": 64, "width": 64}}),
    "granite4_vision": built(
        "Granite4VisionProcessor", "LlavaNextImageProcessor", CROPS | {"image_grid_pinpoints": TILES},
        patch_size=8, vision_feature_select_strategy="full", downsample_rate="1/2",
    ),
    "llama4": built("Llama4Processor", "Llama4ImageProcessor", SQUARE, patch_size=8),
    "granite_docling": built("GraniteDoclingProcessor", "GraniteDoclingImageProcessor", SQUARE, image_seq_len=4),
}  # fmt: skip


def tiny_bundle(name: str, *, images: bool, checked: bool = True) -> ModelBundle:
    """Return a family's tiny model with its tokenizer and, for images, its processor.

    Args:
        name: Type of its config, or a name of `KINDS`.
        images: Whether prompts show images.
        checked: Whether it is refused as a loaded model is.

    Raises:
        ValueError: It can't be run.
    """
    words = tokenizer(SLOTS.get(name, "<image>"), **NAMED.get(name, {}))
    kind = CONFIG_MAPPING[KINDS.get(name, name)]
    names = fields_of(kind) | EXTRA.get(name, set())
    ids = token_ids(words, names, MARKS | NAMED.get(name, {}))
    if name in FEATURES:
        feature = words.convert_tokens_to_ids(FEATURES[name])
        ids |= {key: feature for key in ids if key.startswith("image_token_")}
    config = kind(**merged(sizes(kind), SETTINGS.get(name, {}) | ids))
    for part in (config, config.get_text_config()):
        part.vocab_size = len(words) + 3
        part.pad_token_id, part.bos_token_id = words.pad_token_id, words.bos_token_id
        part.eos_token_id = words.eos_token_id
    switch_dropout_off(config)
    processor = PROCESSORS[name](words, config) if sees_images(config) and images else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = model_class(config).from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(torch.randn_like(parameter) * 2.0 * parameter.shape[-1] ** -0.5)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    switch_modules_off(model)
    model.generation_config = GenerationConfig(eos_token_id=words.eos_token_id)
    settings = IMAGE_SETTINGS.get(name, {}) if processor is not None else {}
    bundle = ModelBundle(model.eval(), words, processor, settings, source=name)
    if checked:
        check_family(bundle, shows_images=processor is not None)
    return bundle


def known_families() -> list[str]:
    """Return the types of all configs that transformers has a decoder for."""
    mappings = (AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping)
    kinds = {kind.model_type for mapping in mappings for kind in mapping}
    return sorted(kinds | set(KINDS))
