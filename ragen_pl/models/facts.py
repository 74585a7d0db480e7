"""ModelFacts: properties of a model's inputs, from its class and configs. The only place that probes them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# layers with keys and values of every token
_ATTENTION = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Properties of a model that its family may or may not have, with their defaults."""

    family: str = ""
    """`model_type` of the config."""
    image_token_id: int | None = None
    """Id that stands for an image's features."""
    eos_token_ids: frozenset[int] = frozenset()
    """Ids that end a response, by the generation config."""
    logit_factor: float = 1.0
    """Factor of the logits: Granite divides them, Cohere multiplies them."""
    logit_bound: float | None = None
    """Bound of the logits, as in Gemma 2."""
    additive_masks: bool = False
    """Whether attention adds its mask to the scores instead of reading it as true and false."""
    custom_masks: bool = True
    """Whether attention takes any mask. Flash attention does not, and flex attention compiles each anew."""
    masks_by_function: bool = True
    """Whether attention masks what the model asks for, such as images whose tokens attend to each other."""
    layer_types: frozenset[str] | None = None
    """Types of the decoder's layers; None for a decoder that takes one mask for all."""
    sliding_window: int | None = None
    """Number of latest tokens that sliding layers attend to, the token itself included."""
    position_axes: int = 1
    """Axes of a position: 3 (time, height, width) for multimodal rotary embeddings (Qwen2-VL, section 2.1)."""
    token_types: str | None = None
    """Argument that marks image tokens."""
    bidirectional_layers: frozenset[str] = frozenset()
    """Types of the layers in which the tokens of an image attend to each other both ways."""
    attends_both_ways: bool = False
    """Whether all tokens of a prompt, or a prefix of it, attend to each other both ways, as in PaliGemma."""
    takes_features: bool = True
    """Whether the model takes encoded images."""
    reads_end: bool = False
    """Whether the decoder computes only the states from a position `first_read` on, if asked to: it cuts its mask."""
    keeps_logits: bool = False
    """Whether the model's forward computes the logits of the last tokens only, if asked to."""
    vision_arguments: frozenset[str] = frozenset()
    """Arguments of `get_image_features`."""

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep a state instead of keys and values, such as convolutions and linear attention.

        Their state cannot continue after padding. Only the model's own cache serves them.
        """
        return bool((self.layer_types or frozenset()) - _ATTENTION)

    @property
    def plain_positions(self) -> bool:
        """Whether leaving tokens out keeps a sequence valid: positions are counted and all attention is causal."""
        return self.position_axes == 1 and not self.bidirectional_layers

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelFacts:
        """Read the facts of a model."""
        config, generation, text = (
            model.config,
            model.generation_config,
            model.config.get_text_config(),
        )
        eos = None if generation is None else generation.eos_token_id
        factor = getattr(text, "logit_scale", None) or 1.0
        divisor = getattr(text, "logits_scaling", None) or 1.0
        layer_types = getattr(text, "layer_types", None)
        base: Any = model.base_model
        arguments = inspect.signature(base.forward).parameters
        encode = getattr(model, "get_image_features", None)
        types = [name for name in ("mm_token_type_ids", "token_type_ids") if name in arguments]
        attention = text._attn_implementation
        return cls(
            family=config.model_type,
            image_token_id=getattr(config, "image_token_id", None),
            eos_token_ids=frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos),
            logit_factor=factor / divisor,
            logit_bound=getattr(text, "final_logit_softcapping", None),
            additive_masks=attention == "eager",
            custom_masks=attention in ("eager", "sdpa"),
            masks_by_function=attention in ("eager", "sdpa", "flex_attention"),
            layer_types=None if layer_types is None else frozenset(layer_types),
            sliding_window=getattr(text, "sliding_window", None),
            position_axes=3 if hasattr(base, "get_rope_index") else 1,
            token_types=types[0] if encode is not None and types else None,
            bidirectional_layers=_bidirectional_layers(model, text),
            attends_both_ways=getattr(text, "use_bidirectional_attention", None) is True,
            takes_features="mm_encoder_outputs" in arguments,
            reads_end="first_read" in arguments and attention in ("eager", "sdpa"),
            keeps_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
            vision_arguments=frozenset(
                () if encode is None else inspect.signature(encode).parameters
            ),
        )


def _bidirectional_layers(model: PreTrainedModel, text: Any) -> frozenset[str]:
    """Return the layers in which image tokens attend to each other: in Gemma 4 a setting, and sliding layers only."""
    family = model.config.model_type
    if family == "gemma3":
        return _ATTENTION
    if getattr(text, "use_bidirectional_attention", None) != "vision":
        return frozenset()
    return frozenset({"sliding_attention"}) if family == "gemma4" else _ATTENTION
