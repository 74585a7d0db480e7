"""Attention over sequences that lie one after the other in one row, in one call for all of them.

transformers gives an attention function whose name says "flash" all windows of all images at once, with their bounds;
any other is called once a window, in a loop. `packed_attention` is registered under such a name. On CUDA in 16 bits it
is PyTorch's flash attention for unequal lengths (`torch.nn.attention.varlen`, Dao 2023,
https://arxiv.org/abs/2307.08691), which no other package is needed for. Elsewhere sequences of equal length are
computed together by `scaled_dot_product_attention`. Rows that share prefixes lie in levels (`Level`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PACKED = "packed_flash"
"""Name in transformers' registry. A digit in it would be the version of a package that transformers then imports."""

PACKED_ROWS = "packed_rows_sdpa"
"""Name of `causal_attention`, whose masks are those of `sdpa`."""

# arguments of layers that attend otherwise than to all that precedes
_NOT_PACKED = ("sliding_window", "softcap", "s_aux", "position_bias")
_ARGUMENTS = inspect.signature(varlen_attn).parameters
# that of torch 2.10 takes no scale
_VARLEN_TAKES_SCALE = "scale" in _ARGUMENTS
# older releases infer grouped-query attention from the shapes
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _ARGUMENTS else {}
# of the kernels: the largest head, and what its size is a multiple of
_LARGEST_HEAD, _HEAD_STEP = 256, 8
_TYPES = (torch.bfloat16, torch.float16)


class LayoutError(RuntimeError):
    """A layer does not attend as the sequences of one row lie."""


@dataclass(frozen=True, slots=True)
class Level:
    """Parts of equal length that lie one after the other, and continue parts of the level before."""

    parts: int
    width: int
    """Length of each part."""
    continued: Tensor | None
    """int64 `[parts]`, the part of the level before that each continues; None on the first level."""
    mask: Tensor | None
    """bool `[1, 1, width, all before + width]`, True where a position attends; None on the first level."""


def pack_images(model: PreTrainedModel) -> bool:
    """Let a model's image encoder attend by `packed_attention`, where it takes the bounds of images or windows.

    Args:
        model: Model whose encoder attends by `sdpa`, changed in place. Its saved config stays the same.

    Returns:
        Whether the encoder takes bounds. Others compute images of one size in a batch.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

    encoder = model.get_encoder(modality="image")
    # a model without an encoder returns itself, or None; that of another library has no such functions
    if encoder in (None, model, model.base_model) or not isinstance(encoder, PreTrainedModel):
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


def pack_rows(config: PretrainedConfig) -> None:
    """Let a decoder attend by `causal_attention`, which is `sdpa` in passes without bounds.

    Args:
        config: The decoder's config, changed in place for good: gradient checkpointing calls its layers again later.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if config._attn_implementation == "sdpa":
        ALL_ATTENTION_FUNCTIONS.register(PACKED_ROWS, causal_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED_ROWS, sdpa_mask)
        config._attn_implementation = PACKED_ROWS


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    levels: Sequence[Level] | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Attend inside each of several sequences to what precedes; without bounds and levels, as transformers' `sdpa`.

    Args:
        module: Module that attends.
        query: `[rows, heads, time, width]`; with bounds or levels of one row, with levels of its last positions.
        key: `[rows, key heads, slots, width]`.
        value: `[rows, key heads, slots, width]`.
        attention_mask: Mask; without slots beside bounds and levels, which it is not read with.
        cu_seq_lens_q: int32 `[sequences + 1]`, bounds of the sequences; see `packed_attention`.
        levels: Levels of sequences that share prefixes.
        settings: Other arguments of `packed_attention` or of `sdpa`.

    Raises:
        LayoutError: The layer attends in a way that bounds and levels leave out, or was handed neither, only the mask.
    """
    is_told = cu_seq_lens_q is not None or levels is not None
    if is_told and (other := [name for name in _NOT_PACKED if settings.get(name) is not None]):
        raise LayoutError(f"{type(module).__name__} attends with {other[0]}")
    if levels is not None:
        return _by_level(module, query, key, value, levels, settings | {"is_causal": True}), None
    if cu_seq_lens_q is not None:
        return packed_attention(
            module,
            query,
            key,
            value,
            cu_seq_lens_q=cu_seq_lens_q,
            **settings | {"is_causal": True},
        )
    if attention_mask is not None and not attention_mask.shape[-1]:
        raise LayoutError(f"{type(module).__name__} got no layout of the sequences in one row")
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, **settings
    )
    return output


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


def runs_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether tensors of this type are attended to by one kernel on this device."""
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return _has_kernels(device) and _VARLEN_TAKES_SCALE and dtype in _TYPES


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _takes_varlen(query: Tensor, *, on_gpu: bool) -> bool:
    """Return whether PyTorch's flash attention for unequal lengths takes queries `[1, heads, time, width]`."""
    return (
        on_gpu
        and _VARLEN_TAKES_SCALE
        and query.dtype in _TYPES
        and query.shape[-1] <= _LARGEST_HEAD
        and query.shape[-1] % _HEAD_STEP == 0
    )


def _by_level(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    levels: Sequence[Level],
    settings: dict[str, Any],
) -> Tensor:
    """Attend in each part to itself and to the parts that it continues, and return `[1, time, heads, width]`.

    The arguments are those of `causal_attention`.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sizes = [level.parts * level.width for level in levels]
    unread = key.shape[2] - query.shape[2]
    skipped = [*accumulate(sizes, initial=0)].index(unread)
    # slices would have gradients of the whole row each
    queries = [None] * skipped + [*query[0].split(sizes[skipped:], dim=1)]
    keys, values = (each[0].split(sizes, dim=1) for each in (key, value))
    outputs = []
    states: list[Tensor] = []
    for level, read, *own in zip(levels, queries, keys, values, strict=True):
        own = [_in_parts(each, level) for each in own]
        if level.continued is not None:
            earlier = [_continued(each, level.continued) for each in states]
            own = [torch.cat(pair, dim=2) for pair in zip(earlier, own, strict=True)]
        states = own
        if read is not None:
            output: Tensor = sdpa_attention_forward(
                module, _in_parts(read, level), states[0], states[1], level.mask, **settings
            )[0]
            outputs.append(output.flatten(0, 1))
    return torch.cat(outputs)[None]


def _in_parts(row: Tensor, level: Level) -> Tensor:
    """Return `[parts, heads, width, head width]` of a level's `[heads, time, head width]`."""
    return row.unflatten(1, (level.parts, level.width)).transpose(0, 1)


def _continued(states: Tensor, parts: Tensor) -> Tensor:
    """Return keys or values of parts `[parts, heads, time, head width]`, each as often as it is continued."""
    if len(states) == 1:
        return states.expand(len(parts), -1, -1, -1)
    # gradients of what several parts continue add up in float32
    return states.float().index_select(0, parts).to(states.dtype)


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
        queries, keys, values = (
            part.unflatten(0, (-1, length)).transpose(1, 2) for part in of_length
        )
        output = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            scale=scale,
            is_causal=is_causal,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return outputs[0] if order is None else torch.cat(outputs).index_select(0, order.argsort())
