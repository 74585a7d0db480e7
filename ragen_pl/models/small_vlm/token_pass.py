"""One sampled token of each cached sequence through the decoder of a small model.

For a few rows the layers of transformers spend more time on choosing their way than on computing. This pass takes the
one way that sampling needs: no gradient, keys and values in a cache, one column. Its attention is two products of
matrices, which is faster for one query than `scaled_dot_product_attention` on a CPU. The projections are the layers'
own modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache


def token_states(
    decoder: Any, ids: Tensor, *, positions: Tensor, mask: Tensor | None, cache: Cache
) -> Tensor:
    """Return the decoder's last hidden states of one token of each row, `[rows, hidden]`.

    Args:
        decoder: Decoder of a small model, a `LlamaModel` or a `Qwen2Model`.
        ids: int64 `[rows]`.
        positions: int64 `[rows, 1]`.
        mask: bool `[rows, 1, 1, slots]`, slots of the cache to attend to, the new one included; None for all.
        cache: Keys and values of earlier tokens; those of this one are appended.
    """
    hidden: Tensor = decoder.embed_tokens(ids)
    cos, sin = decoder.rotary_emb(hidden, positions)
    first, second = sin.chunk(2, -1)
    rotation = cos, torch.cat((-first, second), -1)
    bias = None if mask is None else torch.where(mask[:, :, 0], 0.0, -torch.inf)
    for layer in decoder.layers:
        normed = _normed(layer.input_layernorm, hidden)
        hidden = hidden + _attended(layer.self_attn, normed, rotation, bias, cache)
        hidden = hidden + layer.mlp(_normed(layer.post_attention_layernorm, hidden))
    return _normed(decoder.norm, hidden)


def _attended(
    attention: Any,
    hidden: Tensor,
    rotation: tuple[Tensor, Tensor],
    bias: Tensor | None,
    cache: Cache,
) -> Tensor:
    """Return the output of an attention layer, `[rows, hidden]`.

    Args:
        attention: Attention of a Llama or Qwen2 layer.
        hidden: `[rows, hidden]`.
        rotation: Cosines, and sines of which the first half is negative, each `[rows, 1, head_dim]`.
        bias: `[rows, 1, slots]`, term of the scores.
        cache: Keys and values.
    """
    rows, width = len(hidden), attention.head_dim
    heads = torch.cat((attention.q_proj(hidden), attention.k_proj(hidden)), -1)
    heads = heads.view(rows, -1, width)
    first, second = heads.chunk(2, -1)
    cos, sin = rotation
    heads = torch.addcmul(heads * cos, torch.cat((second, first), -1), sin)
    groups = attention.num_key_value_groups
    key_heads = heads.shape[1] // (groups + 1)
    query, key = heads.split((groups * key_heads, key_heads), 1)
    value = attention.v_proj(hidden).view(rows, key_heads, 1, width)
    keys, values = cache.update(key[:, :, None], value, attention.layer_idx)
    query = (query * attention.scaling).reshape(rows * key_heads, groups, width)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    scores = torch.bmm(query, keys.transpose(1, 2))
    if bias is not None:
        scores.view(rows, -1, scores.shape[-1]).add_(bias)
    output = torch.bmm(scores.softmax(-1), values)
    result: Tensor = attention.o_proj(output.view(rows, -1))
    return result


def _normed(norm: Any, hidden: Tensor) -> Tensor:
    """Return the output of an RMSNorm, in fewer operations than `functional.rms_norm` takes on a CPU."""
    squares = torch.linalg.vecdot(hidden, hidden)[:, None]
    scale = squares.div_(hidden.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    return hidden * scale * norm.weight
