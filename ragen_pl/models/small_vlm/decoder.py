"""The decoder: Qwen2 whose last layer computes only the states that are read.

The states of an image's tokens and of the prompt are read by later layers alone, as keys and values. In the last layer
nobody reads them, so its queries and its feed-forward network run from the first position that predicts a token on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, Qwen2Config, Qwen2Model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Attention,
    Qwen2DecoderLayer,
    apply_rotary_pos_emb,
    eager_attention_forward,
)


class LastAttention(Qwen2Attention):
    """Attention whose queries are those of the last positions, and whose keys and values are those of all."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        first_read: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output at the positions from `first_read` on, `[rows, time - first_read, hidden]`."""
        if first_read == 0:
            return super().forward(
                hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs
            )
        (cos, sin), read = position_embeddings, slice(first_read, None)
        query = self._heads(self.q_proj(hidden_states[:, read]))
        key = self._heads(self.k_proj(hidden_states))
        value = self._heads(self.v_proj(hidden_states))
        query, _ = apply_rotary_pos_emb(query, query[:, :0], cos[:, read], sin[:, read])
        key, _ = apply_rotary_pos_emb(key, key[:, :0], cos, sin)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention(
            self,
            query,
            key,
            value,
            _rows_of_mask(attention_mask, query, key),
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.flatten(2)), weights

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class LastLayer(Qwen2DecoderLayer):
    """Decoder layer that returns the states of the last positions."""

    def __init__(self, config: Qwen2Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = LastAttention(config, layer_idx)

    def forward(self, hidden_states: Tensor, *, first_read: int = 0, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """Return the states of the positions from `first_read` on, `[rows, time - first_read, hidden]`."""
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, first_read=first_read, **kwargs)
        states: Tensor = hidden_states[:, first_read:] + attended
        return states + self.mlp(self.post_attention_layernorm(states))


class SmallDecoder(Qwen2Model):
    """Qwen2 with a `LastLayer`. Its weights have the names of Qwen2's.

    `forward` takes `first_read`, the first position whose state is read; the states returned begin there.
    """

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        drawn = self.layers[-1]
        assert isinstance(drawn, Qwen2DecoderLayer)
        # drawing weights again would change those of the layers that are drawn later
        with torch.device("meta"):
            last = LastLayer(config, config.num_hidden_layers - 1)
        for part, source in ((last.self_attn, drawn.self_attn), (last, drawn)):
            for name, child in source.named_children():
                if child is not drawn.self_attn:
                    setattr(part, name, child)
        self.layers[-1] = last


def _rows_of_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask's rows of the last positions; the causal mask for None."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is not None:
        return mask[:, :, -queries:]
    if queries == 1:
        return None
    every = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    return every.tril(keys - queries)[None, None]
