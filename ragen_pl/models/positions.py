"""Positions in long conversations: rotary scalings that depend on the length, and tables of learned positions.

transformers chooses the frequencies of `longrope` and `dynamic` scalings by the longest position of a call. Rows of a
microbatch would then depend on each other, and keys in a cache would have other frequencies than the query. Servers
such as vLLM choose once, by the longest sequence that they take. `fix_rotary_scaling` does so in the model's config,
which the engine, the trainer, the reference, the critic and an exported folder all read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from ragen_pl.base.instances import instances
from ragen_pl.models.facts import scalings

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# a table may have some rows before the first position
_OFFSETS = (0, 1, 2)


def fix_rotary_scaling(config: PretrainedConfig, *, max_tokens: int | None) -> str | None:
    """Choose the frequencies of a decoder's rotary scalings by the longest conversation.

    `longrope` (Ding et al., 2024, arXiv 2402.13753) keeps its long factors, or its short ones where no conversation
    exceeds the original length. `dynamic` scaling becomes a base that does not change.

    Args:
        config: Config of a model, changed in place.
        max_tokens: Tokens of the longest conversation; None for the original length.

    Returns:
        One line on the frequencies of a conversation beyond the original length; None if nothing is scaled.
    """
    text = config.get_text_config()
    line = None
    for scaling in scalings(text):
        kind, original = scaling.get("rope_type"), None
        # a constant alpha, as in Hunyuan, does not depend on the length
        if kind == "dynamic" and not scaling.get("alpha"):
            original = _fix_dynamic(scaling, text, max_tokens)
        elif kind == "longrope":
            original = _fix_longrope(scaling, max_tokens)
        if original is not None and max_tokens is not None and max_tokens > original:
            line = (
                f"the rotary scaling ({kind}) of all conversations is that of {max_tokens} tokens, since "
                f"context.max_tokens exceeds the original length of {original}"
            )
    if line is not None:
        # a server takes no longer sequences than this
        text.max_position_embeddings = max(text.max_position_embeddings, max_tokens or 0)
    return line


def _fix_longrope(scaling: dict[str, Any], max_tokens: int | None) -> int:
    """Keep the long or the short factors, and return the original length."""
    original = int(scaling["original_max_position_embeddings"])
    used = "long" if max_tokens is not None and max_tokens > original else "short"
    for name in ("factor", "mscale"):
        if f"{used}_{name}" in scaling:
            scaling[f"short_{name}"] = scaling[f"long_{name}"] = scaling[f"{used}_{name}"]
    return original


def _fix_dynamic(scaling: dict[str, Any], text: Any, max_tokens: int | None) -> int:
    """Set the base of the longest conversation, and return the original length."""
    original = int(text.max_position_embeddings)
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rotated = int(head_size * scaling.get("partial_rotary_factor", 1.0))
    factor, length = scaling.pop("factor"), max(max_tokens or 0, original)
    stretch = (factor * length / original - (factor - 1)) ** (rotated / (rotated - 2))
    scaling |= {"rope_type": "default", "rope_theta": scaling["rope_theta"] * stretch}
    return original


def check_length(model: PreTrainedModel, *, max_tokens: int | None) -> str | None:
    """Check that a model has positions for the longest conversation.

    Args:
        model: Model.
        max_tokens: Tokens of the longest conversation; None for any.

    Returns:
        One line if the model was trained on shorter sequences; None otherwise.

    Raises:
        ValueError: It has learned a number of positions that is too small.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if max_tokens is None or longest is None or max_tokens <= longest:
        return None
    if _has_table(model, longest):
        raise ValueError(
            f"context.max_tokens={max_tokens}: {type(model).__name__} has positions for {longest} tokens; set "
            f"context.max_tokens={longest} or less"
        )
    return f"context.max_tokens={max_tokens} exceeds the {longest} tokens that the model's config names"


def _has_table(model: PreTrainedModel, positions: int) -> bool:
    words = model.get_input_embeddings()
    return any(
        part is not words and part.num_embeddings - positions in _OFFSETS
        for part in instances(model.get_decoder().modules(), nn.Embedding)
    )
