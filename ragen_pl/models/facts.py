"""ModelFacts: properties of a model's inputs, from its class and configs. The only place that probes them."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ragen_pl.base.instances import instances
from ragen_pl.models.attention import PACKED_ROWS
from ragen_pl.models.logit_scale import LogitScale

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# layers with keys and values of every token
_ATTENTION = frozenset({"full_attention", "sliding_attention"})
# layers with a window of later calls only
_BY_CALL = frozenset({"reference_sliding_attention"})
# sizes of images in patches, as families call them: Qwen's and their relatives, and MiniCPM-V
_GRIDS = frozenset({"image_grid_thw", "target_sizes"})
# files of transformers' families, and those of this package
_FAMILIES, _PACKAGE = "/transformers/models/", Path(__file__).parents[1].as_posix()
# implementations that take any mask
_MASKED = ("eager", "sdpa", PACKED_ROWS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Properties of a model that its family may or may not have, with their defaults."""

    family: str = ""
    """`model_type` of the config."""
    image_token_id: int | None = None
    """Id that stands for an image's features."""
    logit_scale: LogitScale = field(default_factory=LogitScale)
    """What becomes of the head's values."""
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
    position_arguments: frozenset[str] = frozenset()
    """Arguments of `get_rope_index`, which computes positions of several axes."""
    arguments: frozenset[str] = frozenset()
    """Arguments of the forward without the head."""
    cache_argument: str = "past_key_values"
    """The one that takes keys and values, or states."""
    takes_positions: bool = True
    """Whether the decoder takes positions, without which those of a row depend on its padding."""
    takes_cache: bool = True
    """Whether the decoder takes keys and values, or states, of earlier tokens."""
    bidirectional_layers: frozenset[str] = frozenset()
    """Types of the layers in which the tokens of an image attend to each other both ways."""
    attends_both_ways: bool = False
    """Whether all tokens of a prompt, or a prefix of it, attend to each other both ways, as in PaliGemma."""
    takes_features: bool = True
    """Whether the model takes encoded images."""
    reads_end: bool = False
    """Whether the decoder computes only the states from a position `first_read` on, if asked to: it cuts its mask."""
    hands_on: bool = False
    """Whether the forward without the head takes positions, and hands arguments that it does not name to attention.

    Attention is then a function of transformers' registry.
    """
    keeps_logits: bool = False
    """Whether the model's forward computes the logits of the last tokens only, if asked to."""
    vision_arguments: frozenset[str] = frozenset()
    """Arguments of `get_image_features`."""
    has_experts: bool = False
    """Whether layers send tokens to experts. How many tokens each gets is read on the host, or has a varying shape."""
    rotates_by_length: bool = False
    """Whether rotary embeddings change with the length of the longest sequence, which the host reads."""

    @property
    def keeps_states(self) -> bool:
        """Whether some layers keep a state instead of keys and values, such as convolutions and linear attention.

        Their state cannot continue after padding. Only the model's own cache serves them.
        """
        return bool((self.layer_types or frozenset()) - _ATTENTION)

    @property
    def layers_by_call(self) -> frozenset[str]:
        """Types of layers in which a token reads those of the first call otherwise than later ones (Unlimited OCR)."""
        return (self.layer_types or frozenset()) & _BY_CALL

    @property
    def token_begins_image(self) -> bool:
        """Whether an image is found by the token before it, which stays with the image: Qwen2.5-Omni's positions."""
        return self.position_axes > 1

    @property
    def grid_argument(self) -> str | None:
        """Input of images that positions are computed from: their sizes in patches; None for positions of one axis."""
        shared = self.position_arguments & self.vision_arguments & _GRIDS
        return min(shared, default=None)

    @property
    def type_arguments(self) -> frozenset[str]:
        """Arguments that say which tokens are those of images."""
        return frozenset(name for name in self.arguments if name.endswith("token_type_ids"))

    @property
    def keeps_keys(self) -> bool:
        """Whether some layers keep keys and values, which all layers of Mamba do without."""
        from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, CacheLayerMixin

        return self.layer_types is None or any(
            issubclass(DYNAMIC_LAYER_TYPE_MAPPING.get(kind, object), CacheLayerMixin)
            for kind in self.layer_types
        )

    @property
    def reads_all_before(self) -> bool:
        """Whether layers read the keys and values of all earlier tokens, and nothing else of them or of later ones."""
        return (
            self.custom_masks
            and self.sliding_window is None
            and (self.layer_types is None or self.layer_types == {"full_attention"})
            and not self.bidirectional_layers
            and not self.attends_both_ways
        )

    @property
    def plain_positions(self) -> bool:
        """Whether leaving tokens out keeps a sequence valid: positions are counted and all attention is causal."""
        return self.position_axes == 1 and not self.bidirectional_layers

    @classmethod
    def of(cls, model: PreTrainedModel, *, logit_scale: LogitScale | None = None) -> ModelFacts:
        """Read the facts of a model.

        Args:
            model: Model.
            logit_scale: Its scale, if it has been measured.
        """
        config, text = model.config, model.config.get_text_config()
        layer_types = getattr(text, "layer_types", None)
        base: Any = backbone_of(model)
        arguments = frozenset(inspect.signature(base.forward).parameters)
        # a wrapper hands arguments on that it does not name
        encode = getattr(base, "get_image_features", getattr(model, "get_image_features", None))
        position_arguments = _arguments(getattr(base, "get_rope_index", None))
        attention = text._attn_implementation
        # some have a wrapper around the decoder that names no argument
        inner = arguments | _arguments(getattr(model.get_decoder(), "forward", None))
        return cls(
            family=config.model_type,
            image_token_id=getattr(config, "image_token_id", None),
            logit_scale=logit_scale or LogitScale.of(model, base),
            additive_masks=attention == "eager",
            custom_masks=attention in _MASKED,
            masks_by_function=attention in (*_MASKED, "flex_attention"),
            layer_types=None if layer_types is None else frozenset(layer_types),
            sliding_window=getattr(text, "sliding_window", None),
            position_axes=_position_axes(text) if position_arguments else 1,
            position_arguments=position_arguments,
            arguments=arguments,
            cache_argument="cache_params" if "cache_params" in arguments else "past_key_values",
            takes_positions="position_ids" in inner,
            takes_cache=bool(inner & {"cache_params", "past_key_values"}),
            bidirectional_layers=_bidirectional_layers(model, text),
            attends_both_ways=getattr(text, "use_bidirectional_attention", None) is True,
            takes_features="mm_encoder_outputs" in arguments,
            reads_end="first_read" in arguments and attention in _MASKED,
            hands_on=model.is_backend_compatible()
            and "position_ids" in arguments
            and any(
                each.kind is each.VAR_KEYWORD
                for each in inspect.signature(base.forward).parameters.values()
            ),
            keeps_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
            vision_arguments=_arguments(encode),
            has_experts=any(hasattr(part, "num_experts") for part in model.modules()),
            rotates_by_length=any(one.get("rope_type") == "dynamic" for one in scalings(text)),
        )


def scalings(text: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of the rotary embeddings, those of each type of layer where these differ."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from instances(parameters.values(), dict)


def backbone_of(model: PreTrainedModel) -> Any:
    """Return a model without its head: its base model, or the decoder in one that is its own base model (Llama 4)."""
    from transformers import PreTrainedModel

    if model.base_model is not model:
        return model.base_model
    decoder = model.get_decoder()
    if decoder is not model:
        return backbone_of(decoder)
    return next(iter(instances(model.children(), PreTrainedModel)), model)


def family_failure(error: BaseException) -> str | None:
    """Return in a clause which part of transformers' code of a family an error ended, without the error's own text.

    Returns:
        The clause; None for an error of other code, and for a lack of memory.
    """
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [Path(code.co_filename).as_posix() for code in codes]
    parts = [code for code, file in zip(codes, files, strict=True) if _FAMILIES in file]
    # errors of this package have their reason
    if isinstance(error, torch.OutOfMemoryError) or not parts or files[-1].startswith(_PACKAGE):
        return None
    return f"{parts[-1].co_qualname} of transformers ends in {type(error).__name__}"


def image_features_of(model: PreTrainedModel) -> Callable[..., Any]:
    """Return what encodes images: the model's own `get_image_features`, or that of the model without its head."""
    owner: Any = model if hasattr(model, "get_image_features") else backbone_of(model)
    features: Callable[..., Any] = owner.get_image_features
    return features


def _arguments(function: Callable[..., Any] | None) -> frozenset[str]:
    return frozenset(() if function is None else inspect.signature(function).parameters)


def _position_axes(text: Any) -> int:
    """Return the number of axes that a rotary embedding has sections for: 3, and 4 in HunYuan-VL."""
    sections = (getattr(text, "rope_parameters", None) or {}).get("mrope_section")
    return 3 if sections is None else len(sections)


def _bidirectional_layers(model: PreTrainedModel, text: Any) -> frozenset[str]:
    """Return the layers in which image tokens attend to each other: in Gemma 4 a setting, and sliding layers only."""
    family = model.config.model_type
    if family == "gemma3":
        return _ATTENTION
    if getattr(text, "use_bidirectional_attention", None) != "vision":
        return frozenset()
    return frozenset({"sliding_attention"}) if family == "gemma4" else _ATTENTION
