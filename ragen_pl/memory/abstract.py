"""Models without data: names, shapes and types of their tensors are known, and the tensors take no memory.

They are built on the meta device. `without_data` then gives them tensors of `ragen_pl.memory.tensors`, on which they
run as other models do. So what a run would allocate can be counted before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ragen_pl.memory.named import named_config
from ragen_pl.models.attention import PACKED, packed_attention
from ragen_pl.models.bundle import ModelBundle
from ragen_pl.models.facts import image_features_of
from ragen_pl.models.image_features import ImageFeatures
from ragen_pl.models.images import (
    PIXELS_PER_CALL,
    HeldFeatures,
    ImageEncoder,
    encoder_outputs,
    features_of,
    joined,
)
from ragen_pl.models.pretrained import describe_pretrained, load_tokenizer, present_image_settings
from ragen_pl.models.vision_parts import vision_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin


class UnknownSizesError(ValueError):
    """A model whose sizes cannot be known without asking the hub."""


# transformers gives an implementation with "flash" in its name all windows at once
_AT_ONCE, _PACKED_ON_GPU = "windows_at_once_flash", f"{PACKED}_on_gpu"


def abstract_pretrained(model: Mapping[str, Any], *, on_gpu: bool = False) -> ModelBundle:
    """Return the bundle that `load_pretrained` would load, on the meta device.

    Args:
        model: The node `model` of a config as plain dictionaries.
        on_gpu: Whether the model is to be run on a GPU, whose kernels allocate otherwise.

    Raises:
        UnknownSizesError: The model is neither a folder nor a named one.
    """
    settings = dict(model["build"])
    path, images = settings.pop("path"), settings.pop("image_processor", None)
    for name in ("_target_", "local_files_only", "revision", "trust_remote_code"):
        settings.pop(name, None)
    config = config_without_hub(model)
    with torch.device("meta"):
        weights = describe_pretrained(config, **settings)
    bundle = AbstractBundle(
        weights, local_tokenizer(path), local_processor(path, config), image_settings=images or {}
    )
    bundle.image_processor = model.get("processor") or {}
    _attend_as_planned(bundle, on_gpu=on_gpu)
    return bundle


def _attend_as_planned(bundle: ModelBundle, *, on_gpu: bool) -> None:
    """Let an encoder of packed images allocate what it would on the run's device.

    With `sdpa` it attends in one call: one for each window and image allocates as much, slowly.
    """
    if "image_grid_thw" not in bundle.facts.vision_arguments:
        return
    vision: Any = bundle.model.config.vision_config
    if vision._attn_implementation == "sdpa":
        ALL_ATTENTION_FUNCTIONS.register(_AT_ONCE, _attention_at_once)
        vision._attn_implementation = _AT_ONCE
    elif vision._attn_implementation == PACKED and on_gpu:
        ALL_ATTENTION_FUNCTIONS.register(_PACKED_ON_GPU, partial(packed_attention, on_gpu=True))
        vision._attn_implementation = _PACKED_ON_GPU


class NormWithoutData(torch.autograd.Function):
    """Allocates the tensors of PyTorch's kernel of RMS norms on a GPU, without their values."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, shape: Sequence[int], weight: Tensor, eps: float
    ) -> Tensor:
        """Return an output like `hidden`; keep the inputs and a factor of each row."""
        factors = hidden.new_empty((*hidden.shape[: -len(shape)], 1), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, factors)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        """Return gradients of the input and of the weights."""
        hidden, weight, _factors = ctx.saved_tensors
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[2] else None
        return torch.empty_like(hidden), None, of_weight, None


def _attention_at_once(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Allocate the tensors of attention over windows, without its values: `[1, patches, heads, width]`."""
    output = functional.scaled_dot_product_attention(query, key, value, scale=scaling)
    # transformers joins the outputs of the windows in a copy
    return output.transpose(1, 2).clone(memory_format=torch.contiguous_format), None


class AbstractBundle(ModelBundle):
    """A pretrained model without data, with the tokenizer and the processor of its folder if there is one.

    The images of a named model are processed by its family's image processor.
    """

    image_processor: Mapping[str, Any] = MappingProxyType({})
    """Settings of a named model's image processor."""

    @property
    def image_token_id(self) -> int | None:
        """Id that stands for an image's features, None for a text model."""
        return self.facts.image_token_id

    @cached_property
    def images(self) -> AbstractImages | None:  # type: ignore[override]
        """Encoder of images, None for a text model."""
        return None if self.image_token_id is None else AbstractImages(self)


class AbstractImages:
    """Encoder of images with a folder's processor, or with the image processor of the model's family."""

    def __init__(self, bundle: AbstractBundle) -> None:
        self.model, self.facts = bundle.model, bundle.facts
        self.written: ImageEncoder | None = None
        if bundle.processor is None:
            self.processor = _image_processor(self.facts.family, bundle.image_processor)
        else:
            self.processor = bundle.processor.image_processor
        self.settings = present_image_settings(self.processor, bundle.image_settings)
        if bundle.processor is not None:
            self.written = ImageEncoder(self.model, bundle.processor, self.facts, self.settings)
        self.held = HeldFeatures()
        self._counts: dict[tuple[int, ...], int] = {}

    def encode(self, images: Sequence[np.ndarray]) -> ImageFeatures:
        """Return the features of images of one size, each uint8 `[height, width, 3]`.

        An encoder without gradients runs on the first image only: it keeps nothing of the others but their features.
        """
        if len(images) > 1 and not (torch.is_grad_enabled() and self._is_trained()):
            return self.encode(images[:1]).select([0] * len(images), [None] * len(images))
        return self._features(self._processed(images[0], count=len(images)))

    def encode_together(self, images: Sequence[np.ndarray]) -> ImageFeatures:
        """Return the features of images of one size, computed in one call of the encoder; see `ImageEncoder`."""
        processed = self._processed(images[0], count=len(images))
        return self._features({name: value.clone() for name, value in processed.items()})

    def images_per_call(self, image: np.ndarray) -> int:
        """Return how many images of this size the encoder computes together; see `ImageEncoder`."""
        inputs = self._processed(image, count=1).values()
        values = sum(value.numel() for value in inputs if value.is_floating_point())
        return max(1, PIXELS_PER_CALL // max(1, values // 3))

    @cached_property
    def frozen(self) -> bool:
        """Whether the features stay as they are while other weights are trained; see `ImageEncoder`."""
        trained = any(weight.requires_grad for weight in self.model.parameters())
        return trained and not any(weight.requires_grad for weight in vision_weights(self.model))

    def _features(self, processed: Mapping[str, Any]) -> ImageFeatures:
        arguments = self.facts.vision_arguments
        encode = image_features_of(self.model)
        output = encode(**{name: value for name, value in processed.items() if name in arguments})
        features, deeper, self.held.form = features_of(output)
        parts = [image.flatten(0, -2) for image in features]
        return ImageFeatures(
            tokens=torch.cat(parts),
            counts=tuple(len(part) for part in parts),
            deepstack=tuple(joined(layer) for layer in deeper),
            grids=processed.get(self.facts.grid_argument or ""),
        )

    def _processed(self, image: np.ndarray, *, count: int) -> dict[str, Any]:
        """Return the processor's inputs for an image, repeated without a copy where they have an axis of images."""
        inputs = self.processor(images=[[image]], return_tensors="pt", **self.settings)
        return {
            name: value.expand(count, *value.shape[1:])
            if len(value) == 1
            else value.repeat(count, *[1] * (value.ndim - 1))
            for name, value in inputs.items()
        }

    def _is_trained(self) -> bool:
        encoder = self.model.get_encoder(modality="image")
        return any(weight.requires_grad for weight in encoder.parameters())

    def num_tokens(self, image: np.ndarray) -> int:
        """Return the number of image tokens of an image `[height, width, 3]`."""
        if self.written is not None:
            return self.written.num_tokens(image)
        if image.shape not in self._counts:
            with torch.no_grad():
                self._counts[image.shape] = self.encode([image]).counts[0]
        return self._counts[image.shape]

    def expand(self, text: str, images: Sequence[np.ndarray]) -> str:
        """Replace the slots of images in a text; see `ImageEncoder.expand`. Only a folder has a template with slots."""
        assert self.written is not None
        return self.written.expand(text, images)

    def check_together(self, images: Sequence[np.ndarray]) -> None:
        """Check that a prompt may show these images; see `ImageEncoder.check_together`."""
        assert self.written is not None
        self.written.check_together(images)

    def token_types(self, ids: Tensor, *, shown: bool) -> dict[str, Tensor]:
        """Return the types of tokens that the model's forward takes; see `ImageEncoder.token_types`."""
        types = ids.eq(-1 if self.facts.image_token_id is None else self.facts.image_token_id)
        return dict.fromkeys(self.facts.type_arguments, types.long()) if shown else {}

    def outputs(self, features: ImageFeatures) -> dict[str, Any]:
        """Return features as the `mm_encoder_outputs` of the model's forward."""
        return encoder_outputs(features, self.held.form)


def _image_processor(family: str, settings: Mapping[str, Any]) -> Any:
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.utils.import_utils import is_torchvision_available

    names = IMAGE_PROCESSOR_MAPPING_NAMES[family]
    wanted = "torchvision" if is_torchvision_available() or "pil" not in names else "pil"
    return getattr(transformers, names[wanted])(**settings)


def config_without_hub(model: Mapping[str, Any]) -> PretrainedConfig:
    """Return the config of a pretrained model from its folder or from the sizes of a named model.

    Raises:
        UnknownSizesError: It has neither.
    """
    from transformers import AutoConfig

    # registers the small model with the Auto classes
    import_module("ragen_pl.models.small_vlm")
    path = model["build"]["path"]
    if Path(path).is_dir():
        config: PretrainedConfig = AutoConfig.from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=bool(model["build"].get("trust_remote_code")),
        )
        return config
    if not model.get("sizes"):
        raise UnknownSizesError(
            f"model.build.path={path}: the sizes of this model are known to the hub only; give a folder, or a named "
            "model such as model=qwen2_5"
        )
    return named_config(model)


def local_processor(path: str, config: PretrainedConfig) -> ProcessorMixin | None:
    """Return the processor of a folder's model with images, None without a folder or images."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    if not Path(path).is_dir() or type(config) not in AutoModelForImageTextToText._model_mapping:
        return None
    processor: ProcessorMixin = AutoProcessor.from_pretrained(
        path, local_files_only=True, trust_remote_code=False
    )
    return processor


def local_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder, or one of a single token in place of one that is not here."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    if Path(path).is_dir():
        return load_tokenizer(path, local_files_only=True)
    words = Tokenizer(WordLevel({"<end>": 0}, unk_token="<end>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
