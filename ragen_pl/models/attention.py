"""Attention over sequences that lie one after the other without padding, in one call for all of them.

transformers gives an attention function whose name says "flash" all windows of all images at once, with their bounds;
any other is called once a window, in a loop. `packed_attention` is registered under such a name. On CUDA in 16 bits it
is PyTorch's flash attention for unequal lengths (`torch.nn.attention.varlen`, Dao 2023,
https://arxiv.org/abs/2307.08691), which no other package is needed for. Elsewhere sequences of equal length are
computed together by `scaled_dot_product_attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PACKED = "packed_flash"
"""Name in transformers' registry. A digit in it would be the version of a package that transformers then imports."""

_ARGUMENTS = inspect.signature(varlen_attn).parameters
# that of torch 2.10 takes no scale
_VARLEN_TAKES_SCALE = "scale" in _ARGUMENTS
# older ones take fewer heads of keys without being told
_GROUPED = {"enable_gqa": True} if "enable_gqa" in _ARGUMENTS else {}
# of the kernels: the largest head, and what its size is a multiple of
_LARGEST_HEAD, _HEAD_STEP = 256, 8


def pack_images(model: PreTrainedModel) -> bool:
    """Let a model's image encoder attend by `packed_attention`, where it takes the bounds of images or windows.

    Args:
        model: Model whose encoder attends by `sdpa`, changed in place. Its saved config stays the same.

    Returns:
        Whether the encoder takes bounds. Others compute images of one size in a batch.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    encoder = model.get_encoder(modality="image")
    # a model without an encoder returns itself, or None
    if encoder is None or encoder is model or encoder is model.base_model:
        return False
    config: PretrainedConfig = encoder.config
    if config is model.config or config is model.config.get_text_config():
        return False
    takes_bounds = any(
        "cu_seqlens" in inspect.signature(part.forward).parameters for part in encoder.modules()
    )
    if not (
        takes_bounds
        and config._attn_implementation == "sdpa"
        and encoder._supports_flash_attn
        and encoder._can_set_attn_implementation()
    ):
        return False
    ALL_ATTENTION_FUNCTIONS.register(PACKED, packed_attention)
    # transformers' setter would look for a package of this name
    config._attn_implementation = PACKED
    return True


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    is_causal: bool = False,
    on_gpu: bool | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend inside each of several sequences; see transformers' `AttentionInterface`.

    Args:
        module: Module that attends.
        query: `[1, heads, time, width]`, the sequences one after the other.
        key: `[1, key heads, time, width]`.
        value: `[1, key heads, time, width]`.
        attention_mask: None: the bounds say all.
        cu_seq_lens_q: int32 `[sequences + 1]`, bounds of the sequences, of queries and keys alike.
        max_length_q: Length of the longest one.
        scaling: Factor of the scores; None for `width ** -0.5`.
        is_causal: Whether a position attends to none after it.
        on_gpu: Whether tensors without data stand for those of a GPU; None for real ones.

    Returns:
        `[1, time, heads, width]`, and None for the weights of attention.
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if _takes_varlen(query, on_gpu=_has_kernels(query.device) if on_gpu is None else on_gpu):
        # cuDNN, which torch would choose on Hopper, makes a plan for each new length
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            output = varlen_attn(
                query[0].transpose(0, 1),
                key[0].transpose(0, 1),
                value[0].transpose(0, 1),
                cu_seq_lens_q,
                cu_seq_lens_q,
                max_length_q,
                max_length_q,
                scale=scaling,
                window_size=(-1, 0) if is_causal else (-1, -1),
                **_GROUPED,
            )
        assert isinstance(output, Tensor)
        return output[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    return _by_length(query, key, value, lengths, scale=scaling, is_causal=is_causal)[None], None


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _takes_varlen(query: Tensor, *, on_gpu: bool) -> bool:
    """Return whether PyTorch's flash attention for unequal lengths takes queries `[1, heads, time, width]`."""
    return (
        on_gpu
        and _VARLEN_TAKES_SCALE
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= _LARGEST_HEAD
        and query.shape[-1] % _HEAD_STEP == 0
    )


def _by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    *,
    scale: float | None,
    is_causal: bool,
) -> Tensor:
    """Attend inside each sequence, those of equal length together, and return `[time, heads, width]`.

    Args:
        query: `[1, heads, time, width]`.
        key: `[1, key heads, time, width]`.
        value: `[1, key heads, time, width]`.
        lengths: Length of each sequence.
        scale: Factor of the scores; None for `width ** -0.5`.
        is_causal: Whether a position attends to none after it.
    """
    starts: dict[int, list[int]] = {}
    start = 0
    for length in lengths:
        starts.setdefault(length, []).append(start)
        start += length
    starts.pop(0, None)
    index = [
        (torch.tensor(first)[:, None] + torch.arange(length)).flatten()
        for length, first in starts.items()
    ]
    order = None if len(index) == 1 else torch.cat(index).to(query.device)
    # [time, heads, width], whose rows are whole in memory
    parts = [each[0].transpose(0, 1) for each in (query, key, value)]
    if order is not None:
        parts = [part.index_select(0, order) for part in parts]
    sizes = [len(each) for each in index]
    outputs = []
    for length, *of_length in zip(starts, *(part.split(sizes) for part in parts), strict=True):
        # [sequences, heads, length, width]
        rows = [part.unflatten(0, (-1, length)).transpose(1, 2) for part in of_length]
        output = functional.scaled_dot_product_attention(
            *rows,
            scale=scale,
            is_causal=is_causal,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return outputs[0] if order is None else torch.cat(outputs).index_select(0, order.argsort())
