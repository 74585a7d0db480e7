"""Types of the models' settings, which the config checks.

Those of the small models are not in `ragen_pl.models.small_vlm`: an exported folder contains its modules, which must
work without this package.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from annotated_types import Ge, Interval

from ragen_pl.constraints import Count, DivisorOf, Positive, needing

Attention = (
    Literal["sdpa", "eager", "flex_attention"]
    | Annotated[
        Literal["flash_attention_2"],
        needing("flash_attention_2", ("flash_attn", "kernels"), "flash-attn"),
    ]
    | Annotated[
        Literal["flash_attention_3"],
        needing("flash_attention_3", ("kernels", "flash_attn_interface"), "kernels"),
    ]
)
"""Implementations of attention in transformers."""


class VisionSettings(TypedDict, total=False):
    """Settings of the image encoder.

    Attributes:
        patch_size: side of a patch in pixels.
        width: size of the features.
        depth: number of timm blocks.
        heads: number of attention heads.
        mlp_ratio: hidden size of a block's MLP as a multiple of `width`.
        max_cells: number of patches along a side that images may have.
    """

    patch_size: Count
    width: Count
    depth: Count
    heads: Annotated[int, Ge(1), DivisorOf("width")]
    mlp_ratio: Positive
    max_cells: Count


class DecoderSettings(TypedDict, total=False):
    """Settings of the decoder that are checked early; others are those of its transformers config.

    Attributes:
        hidden_size: size of the hidden states.
        intermediate_size: hidden size of a layer's MLP.
        num_hidden_layers: number of layers.
        num_attention_heads: number of attention heads.
        num_key_value_heads: number of heads of keys and values.
        max_position_embeddings: longest sequence.
    """

    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Annotated[int, Ge(1), DivisorOf("hidden_size")]
    num_key_value_heads: Annotated[int, Ge(1), DivisorOf("num_attention_heads")]
    # the rotary embedding computes positions in float32, exact up to here
    max_position_embeddings: Annotated[int, Interval(ge=1, le=2**24)]
