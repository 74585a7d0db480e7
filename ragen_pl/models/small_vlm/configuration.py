"""The config of the small vision-language model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, Qwen2Config

VISION: dict[str, Any] = {
    "patch_size": 16,
    "width": 96,
    "depth": 1,
    "heads": 4,
    "mlp_ratio": 2.0,
    "max_cells": 8,
}
TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}


class SmallVLMConfig(PreTrainedConfig):
    """Settings of vision encoder and decoder, and the ids that join them.

    Args:
        vision: `patch_size` in pixels, encoder `width`, `depth` (timm blocks), `heads`, `mlp_ratio`, and
            `max_cells`, the largest number of patches along a side of an image.
        text_config: A `Qwen2Config`, or keyword arguments of one.
        image_token_id: Id that stands for an image's features.
    """

    model_type = "ragen_small_vlm"
    sub_configs = {"text_config": Qwen2Config}  # noqa: RUF012 - as in transformers

    def __init__(
        self,
        vision: dict[str, Any] | None = None,
        text_config: dict[str, Any] | Qwen2Config | None = None,
        image_token_id: int = 0,
        **kwargs: Any,
    ) -> None:
        unknown = set(vision or {}) - set(VISION)
        if unknown:
            raise ValueError(
                f"model.build.vision has unknown keys {sorted(unknown)}; known: {', '.join(VISION)}"
            )
        self.vision = VISION | (vision or {})
        if not isinstance(text_config, Qwen2Config):
            text_config = Qwen2Config(**(TEXT | (text_config or {})))
        self.text_config = text_config
        self.image_token_id = image_token_id
        kwargs.setdefault("tie_word_embeddings", text_config.tie_word_embeddings)
        super().__init__(**kwargs)
