"""New tokens of cached sequences through the decoder of a small model.

For a few tokens the layers of transformers spend more time on choosing their way than on computing. This pass takes the
one way that sampling needs: no gradient, keys and values in a cache, the state of the last token alone. So the last
layer computes one query for each sequence. Attention of one query is two products of matrices, which is faster than
`scaled_dot_product_attention` on a CPU. The projections are the layers' own modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Cache

from ragen_pl.models.inputs import DecoderInputs

Rotation = tuple[Tensor, Tensor]
"""Cosines, and sines of which the first half is negative, each `[rows * new, 1, head_dim]`."""


def last_states(
    decoder: Any, inputs: DecoderInputs, *, cache: Cache, shared_slots: int = 0
) -> Tensor:
    """Return the decoder's last hidden states of the last new token of each row, `[rows, hidden]`.

    Args:
        decoder: Decoder of a small model, a `LlamaModel` or a `Qwen2Model`.
        inputs: New tokens without images, `[rows, new]`, with positions. Only one token a row may be without a mask.
        cache: Keys and values of earlier tokens; those of the new ones are appended.
        shared_slots: Number of first slots that hold the same in all rows.
    """
    rows, new = inputs.ids.shape
    hidden: Tensor = decoder.embed_tokens(inputs.ids.flatten())
    angles = decoder.rotary_emb(hidden, inputs.positions)
    cos, sin = (each.flatten(0, 1)[:, None] for each in angles)
    first, second = sin.chunk(2, -1)
    rotation = cos, torch.cat((-first, second), -1)
    mask, bias = inputs.mask, None
    (mask,) = mask.values() if isinstance(mask, dict) else (mask,)
    if mask is not None:
        bias = torch.where(mask[:, 0, -1:, shared_slots:], 0.0, -torch.inf)
    for layer in decoder.layers:
        normed = _normed(layer.input_layernorm, hidden)
        query, keys, values = _heads(layer.self_attn, normed, rotation, rows, cache)
        if new > 1 and layer is not decoder.layers[-1]:
            attended = functional.scaled_dot_product_attention(
                query,
                keys,
                values,
                attn_mask=mask,
                scale=layer.self_attn.scaling,
                enable_gqa=True,
            )
            attended = attended.transpose(1, 2)
        else:
            hidden = hidden.view(rows, new, -1)[:, -1]
            last = query[:, :, -1] * layer.self_attn.scaling
            attended = _weighted(last, keys, values, bias, shared=shared_slots)
        hidden = hidden + layer.self_attn.o_proj(attended.reshape(len(hidden), -1))
        hidden = hidden + layer.mlp(_normed(layer.post_attention_layernorm, hidden))
    return _normed(decoder.norm, hidden)


def _heads(
    attention: Any, hidden: Tensor, rotation: Rotation, rows: int, cache: Cache
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries of the new tokens, `[rows, heads, new, head_dim]`, and the keys and values of all slots.

    Args:
        attention: Attention of a Llama or Qwen2 layer.
        hidden: `[rows * new, hidden]`.
        rotation: Rotation of queries and keys.
        rows: Number of rows.
        cache: Keys and values, `[rows, key_heads, slots, head_dim]` in each layer.
    """
    width, groups = attention.head_dim, attention.num_key_value_groups
    heads = torch.cat((attention.q_proj(hidden), attention.k_proj(hidden)), -1)
    heads = heads.view(len(hidden), -1, width)
    first, second = heads.chunk(2, -1)
    cos, sin = rotation
    heads = torch.addcmul(heads * cos, torch.cat((second, first), -1), sin)
    key_heads = heads.shape[1] // (groups + 1)
    heads = heads.view(rows, -1, heads.shape[1], width).transpose(1, 2)
    query, key = heads.split((groups * key_heads, key_heads), 1)
    value = attention.v_proj(hidden).view(rows, -1, key_heads, width).transpose(1, 2)
    keys, values = cache.update(key, value, attention.layer_idx)
    return query, keys, values


def _weighted(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, *, shared: int
) -> Tensor:
    """Return the values weighted by the attention of one query a head, `[rows * key_heads, groups, head_dim]`.

    What rows have in common is read in one product for all of them, as in Hydragen (Juravsky et al. 2024,
    https://arxiv.org/abs/2402.05099).

    Args:
        query: Scaled queries, `[rows, heads, head_dim]`.
        keys: `[rows, key_heads, slots, head_dim]`.
        values: Like `keys`.
        bias: `[rows, 1, slots - shared]`, term of the scores of a row's own slots.
        shared: Number of first slots that hold the same in all rows.
    """
    rows, key_heads, _, width = keys.shape
    query = query.reshape(rows * key_heads, -1, width)
    own_keys, own_values = (each[:, :, shared:].flatten(0, 1) for each in (keys, values))
    scores = torch.bmm(query, own_keys.transpose(1, 2))
    if bias is not None:
        scores.view(rows, -1, scores.shape[-1]).add_(bias)
    if not shared:
        return torch.bmm(scores.softmax(-1), own_values)
    groups = query.shape[1]
    common = torch.bmm(_by_head(query, key_heads), keys[0, :, :shared].transpose(1, 2))
    weights = torch.cat((_by_row(common, groups), scores), -1).softmax(-1)
    common = torch.bmm(_by_head(weights[..., :shared], key_heads), values[0, :, :shared])
    return torch.bmm(weights[..., shared:], own_values).add_(_by_row(common, groups))


def _by_head(states: Tensor, heads: int) -> Tensor:
    """Return `[rows * heads, groups, size]` as `[heads, rows * groups, size]`."""
    _, groups, size = states.shape
    return states.view(-1, heads, groups, size).transpose(0, 1).reshape(heads, -1, size)


def _by_row(states: Tensor, groups: int) -> Tensor:
    """Return `[heads, rows * groups, size]` as `[rows * heads, groups, size]`."""
    heads, _, size = states.shape
    return states.view(heads, -1, groups, size).transpose(0, 1).reshape(-1, groups, size)


def _normed(norm: Any, hidden: Tensor) -> Tensor:
    """Return the output of an RMSNorm, in fewer operations than `functional.rms_norm` takes on a CPU."""
    squares = torch.linalg.vecdot(hidden, hidden)[:, None]
    scale = squares.div_(hidden.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    return hidden * scale * norm.weight
