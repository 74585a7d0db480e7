"""Images of a vision-language model: the text of their slots, and their features.

The model's own processor decides both. One slot in a chat template's text becomes the processor's replacement, such
as a begin token, one image token for each feature and an end token. The features come from the model's
`get_image_features`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ragen_pl.base.instances import instances
from ragen_pl.models.facts import image_features_of
from ragen_pl.models.image_features import ImageFeatures
from ragen_pl.models.processor_inputs import EXAMPLE, TokenTypes, on_device, processed, slot_texts
from ragen_pl.models.vision_parts import vision_weights

if TYPE_CHECKING:
    from torch.nn import Parameter
    from transformers import PreTrainedModel, ProcessorMixin

    from ragen_pl.models.facts import ModelFacts


PIXELS_PER_CALL = 2**26
HELD_BYTES = 2**30
# outputs of an image encoder: features of image tokens and of deeper layers, and ends of the names of what no decoder
# reads, such as `high_res_vision_hidden_states` (DeepSeek-VL's hybrid)
_KNOWN = {"pooler_output", "deepstack_features"}
_UNREAD = ("last_hidden_state", "hidden_states", "attentions")


def content_key(image: np.ndarray) -> bytes:
    """Return a key of an image's size and content; equal images have equal keys."""
    digest = blake2b(repr(image.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(image).data)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class FeatureForm:
    """Form in which a model's encoder gives features, and its forward takes them.

    Attributes:
        listed: Whether they are one tensor for each image.
        piece: Tokens of each piece of an image, where they are one tensor `[pieces, tokens, hidden]`; 0 elsewhere.
        layers: Decoder layers that read the features of deeper layers, where the encoder names them (Granite 4 Vision).
    """

    listed: bool = False
    piece: int = 0
    layers: tuple[int, ...] = ()


def features_of(output: Mapping[str, Any]) -> tuple[Any, list[Any], FeatureForm]:
    """Return an encoder's features of image tokens, those of deeper layers, and their form.

    Args:
        output: Output of the model's `get_image_features`.

    Raises:
        KeyError: It has none.
    """
    deeper: Any = output.get("deepstack_features") or ()
    layers: tuple[int, ...] = ()
    if deeper and isinstance(deeper[0], tuple) and isinstance(deeper[0][0], int):
        layers, deeper = zip(*deeper, strict=True)
    features = output.get("pooler_output")
    if features is None and not deeper:
        raise KeyError("pooler_output")
    # image tokens without features of their own have those of the first layer that reads any
    features = deeper[0] if features is None else features
    listed = not isinstance(features, Tensor)
    piece = 0 if listed or features.ndim != 3 else features.shape[1]
    return features, list(deeper), FeatureForm(listed=listed, piece=piece, layers=layers)


@dataclass(slots=True)
class HeldFeatures:
    """Features of images by their content and device; the oldest go first where they take too much memory.

    Attributes:
        max_bytes: Largest size of the features.
        form: Form of the last features that the encoder gave.
    """

    max_bytes: int = HELD_BYTES
    form: FeatureForm = FeatureForm()
    by_key: dict[bytes, ImageFeatures] = field(default_factory=dict, repr=False)
    _size: int = 0

    def add(self, features: Mapping[bytes, ImageFeatures]) -> None:
        """Hold features."""
        self.by_key |= features
        self._size += sum(map(bytes_of, features.values()))
        while self._size > self.max_bytes:
            self._size -= bytes_of(self.by_key.pop(next(iter(self.by_key))))


@dataclass(slots=True)
class ImageEncoder:
    """Turns images into the text of their slots and into features.

    Attributes:
        model: Vision-language model.
        processor: Its processor.
        facts: Facts of the model.
        settings: Keyword arguments of the processor's calls, such as `{"crop_to_patches": False}`.
        pixels_per_call: Pixels of the images that are encoded together, as the processor scales them.
        held: Features that are held of a frozen encoder.
    """

    model: PreTrainedModel
    processor: ProcessorMixin
    facts: ModelFacts
    settings: Mapping[str, Any] = field(default_factory=dict)
    pixels_per_call: int = PIXELS_PER_CALL
    held: HeldFeatures = field(default_factory=HeldFeatures, repr=False)
    _replacements: dict[tuple[int, ...], str] = field(default_factory=dict, repr=False)
    _counts: dict[tuple[int, ...], int] = field(default_factory=dict, repr=False)
    _pixels: dict[tuple[int, ...], int] = field(default_factory=dict, repr=False)
    # sizes of images whose tokens do not depend on the other images
    _alike: set[tuple[int, ...]] = field(default_factory=set, repr=False)
    # sizes of images that the model was seen to encode
    _encoded: set[tuple[int, ...]] = field(default_factory=set, repr=False)
    # sizes of images, and whether the processor's image processor alone reads them as the whole processor does
    _read_alone: dict[tuple[int, ...], bool] = field(default_factory=dict, repr=False)
    # of encoder and projector; None before the first use
    _weights: list[Parameter] | None = field(default=None, repr=False)
    # None before the first use
    _types: TokenTypes | None = field(default=None, repr=False)
    # whether it has the weights and features of a frozen encoder of another model
    _shares: bool = False

    @property
    def slot(self) -> str:
        """Text that stands for an image in a chat template."""
        slot: str = self.processor.image_token  # type: ignore[attr-defined]
        return slot

    def replacement(self, image: np.ndarray) -> str:
        """Return the text that replaces the slot of an image `[height, width, 3]`. It depends on the size only."""
        if image.shape not in self._replacements:
            (self._replacements[image.shape],) = self._written([image])
        return self._replacements[image.shape]

    def _written(self, images: Sequence[np.ndarray]) -> list[str]:
        """Return the text that replaces the slot of each image of a prompt."""
        return slot_texts(
            self.processor, self.slot, images, self.settings, family=self.facts.family
        )

    def check_encodes(self, image: np.ndarray) -> None:
        """Check that processor and model take images of this size, by encoding one of each size.

        Raises:
            ValueError: One of them does not.
        """
        if image.shape in self._encoded:
            return
        try:
            with torch.no_grad():
                self.encode([image])
        # processors and models raise errors of any kind
        except Exception as error:
            height, width, _ = image.shape
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"{self.facts.family} does not take an image of {height} x {width} pixels ({reason:.300})"
            ) from error
        self._encoded.add(image.shape)

    def check_together(self, images: Sequence[np.ndarray]) -> None:
        """Check that a prompt may show these images: that an image's tokens do not depend on the others.

        LLaVA-OneVision cuts the only image of a prompt into tiles, and leaves several images whole. A prompt could not
        grow by an image then, for the tokens of earlier images would change.

        Raises:
            ValueError: The processor treats an image among others differently.
        """
        if len(images) < 2:
            return
        for shape, image in {image.shape: image for image in images}.items():
            if shape in self._alike:
                continue
            alone = self.replacement(image)
            if self._written([image, image]) != [alone, alone]:
                raise ValueError(
                    f"{self.facts.family} reads an image in another way if the prompt shows several, and this prompt "
                    f"shows {len(images)}; set context.window=1 with one image in an observation, or choose another "
                    "model"
                )
            self._alike.add(shape)

    def expand(self, text: str, images: Sequence[np.ndarray]) -> str:
        """Return a text with the slot of each image replaced.

        Raises:
            ValueError: The number of slots is not the number of images.
        """
        parts = text.split(self.slot)
        if len(parts) != len(images) + 1:
            raise ValueError(
                f"the prompt has {len(parts) - 1} image slots for {len(images)} images"
            )
        expanded = [parts[0]]
        for image, part in zip(images, parts[1:], strict=True):
            expanded += [self.replacement(image), part]
        return "".join(expanded)

    def num_tokens(self, image: np.ndarray) -> int:
        """Return the number of image tokens of an image `[height, width, 3]`."""
        if image.shape not in self._counts:
            tokenizer: Any = self.processor.tokenizer
            ids = tokenizer(self.replacement(image), add_special_tokens=False)["input_ids"]
            self._counts[image.shape] = ids.count(self.facts.image_token_id)
        return self._counts[image.shape]

    def encode(self, images: Sequence[np.ndarray]) -> ImageFeatures:
        """Return the features of images of any sizes, each uint8 `[height, width, 3]`.

        Raises:
            ValueError: The model gives another number of features than the processor has image tokens.
        """
        return self._encode_frozen(images) if self.frozen else self._encode_all(images)

    @property
    def frozen(self) -> bool:
        """Whether the features stay as they are while other weights are trained."""
        if self._shares:
            return True
        if self._weights is None:
            self._weights = vision_weights(self.model)
        if any(weight.requires_grad for weight in self._weights):
            return False
        return any(weight.requires_grad for weight in self.model.parameters())

    def share(self, other: ImageEncoder) -> None:
        """Use the features of another model's encoder if it is frozen and has the same weights."""
        pairs = zip(vision_weights(self.model), vision_weights(other.model), strict=True)
        if all(own is others and not own.requires_grad for own, others in pairs):
            self.held, self._shares = other.held, True

    def _encode_frozen(self, images: Sequence[np.ndarray]) -> ImageFeatures:
        """Return the features of images, each encoded once in the life of the model while it fits."""
        device = str(next(self.model.parameters()).device).encode()
        keys = [content_key(image) + device for image in images]
        known = {key: self.held.by_key[key] for key in keys if key in self.held.by_key}
        new = {key: image for key, image in zip(keys, images, strict=True) if key not in known}
        if new:
            # tensors of the engine's inference mode can't take part in a training step
            with torch.inference_mode(False), torch.no_grad():
                features = self._encode_all(list(new.values()))
            # copies: views would hold the features of all images
            added = {key: features.select([number], [None]) for number, key in enumerate(new)}
            self.held.add(added)
            known |= added
        return ImageFeatures.join([known[key] for key in keys])

    def _encode_all(self, images: Sequence[np.ndarray]) -> ImageFeatures:
        by_size: dict[tuple[int, ...], list[int]] = {}
        for number, image in enumerate(images):
            by_size.setdefault(image.shape, []).append(number)
        calls = [call for numbers in by_size.values() for call in self._calls(images, numbers)]
        parts = [self.encode_together([images[number] for number in call]) for call in calls]
        features = ImageFeatures.join(parts)
        order = [number for call in calls for number in call]
        if order == sorted(order):
            return features
        place = np.argsort(order).tolist()
        return features.select(place, [None] * len(place))

    def _calls(self, images: Sequence[np.ndarray], numbers: list[int]) -> list[list[int]]:
        """Split images of one size into calls of the encoder."""
        step = self.images_per_call(images[numbers[0]])
        return [numbers[start : start + step] for start in range(0, len(numbers), step)]

    def images_per_call(self, image: np.ndarray) -> int:
        """Return how many images of this size the encoder computes together."""
        return max(1, self.pixels_per_call // self._scaled_pixels(image))

    def _scaled_pixels(self, image: np.ndarray) -> int:
        """Return the pixels that the encoder sees of an image. Gemma 3's sees 896 x 896 of any."""
        if image.shape not in self._pixels:
            tensors = instances(self.inputs([[image]]).values(), Tensor)
            values = sum(value.numel() for value in tensors if value.is_floating_point())
            self._pixels[image.shape] = max(1, values // 3)
        return self._pixels[image.shape]

    def encode_together(self, images: Sequence[np.ndarray]) -> ImageFeatures:
        """Return the features of images of one size, computed in one call of the encoder."""
        inputs = self._inputs_of_one_size(images)
        encode = image_features_of(self.model)
        output = encode(**inputs)
        counts = tuple(self.num_tokens(image) for image in images)
        kinds = {n for n in output if output[n] is not None and not n.endswith(_UNREAD)}
        if kinds - _KNOWN or not kinds:
            raise ValueError(
                f"model.build: transformers' {self.facts.family} gives image features of a kind of its own "
                f"({', '.join(sorted(kinds - _KNOWN)) or 'none'}), not one vector for each image token; choose another "
                "model"
            )
        features, deeper, self.held.form = features_of(output)
        tokens = joined(features)
        if len(tokens) != sum(counts):
            raise ValueError(
                f"{self.facts.family}: the model gives {len(tokens)} features for {len(images)} images and the "
                f"processor has {sum(counts)} image tokens for them; the two do not belong together"
            )
        return ImageFeatures(
            tokens=tokens,
            counts=counts,
            deepstack=tuple(joined(layer) for layer in deeper),
            grids=self._grids(inputs, count=len(images)),
        )

    def _grids(self, inputs: Mapping[str, Any], *, count: int) -> Tensor | None:
        """Return the input that positions are computed from, which has a row for each image.

        Raises:
            ValueError: An image has several rows.
        """
        name = self.facts.grid_argument
        grids: Tensor | None = None if name is None else inputs.get(name)
        if grids is not None and len(grids) != count:
            raise ValueError(
                f"model.build.image_processor: {self.facts.family} computes positions of the parts that an image is "
                f"cut into ({len(grids)} for {count} images), which is not known here; set one part for an image, such "
                "as max_slice_nums=1, or choose another model"
            )
        return grids

    def inputs(self, samples: Sequence[Sequence[np.ndarray]]) -> dict[str, Any]:
        """Return the image inputs of the model's forward.

        Args:
            samples: Images of each sequence.
        """
        return self._for_the_model(
            processed(
                self.processor,
                images=[list(images) for images in samples],
                text=[self.slot * len(images) for images in samples],
                return_tensors="pt",
                **self.settings,
            )
        )

    def _inputs_of_one_size(self, images: Sequence[np.ndarray]) -> dict[str, Any]:
        """Return the image inputs of images of one size, each in a sequence of its own.

        The whole processor also tokenizes a text for each image, which takes longer than the pixels of a small one.
        """
        shape = images[0].shape
        # one image does not tell whether a dimension counts images or sequences
        if shape not in self._read_alone and len(images) > 1:
            self._read_alone[shape] = self._reads_alone(images[:2])
        if self._read_alone.get(shape, False):
            return self._for_the_model(self._image_outputs(images))
        return self.inputs([[image] for image in images])

    def _reads_alone(self, images: Sequence[np.ndarray]) -> bool:
        """Return whether the image processor alone gives the inputs of the whole processor for these images."""
        if "image_processor" not in self.processor.get_attributes():
            return False
        try:
            alone = self._for_the_model(self._image_outputs(images))
        # it need not take images without text, and may raise anything
        except Exception:
            return False
        inputs = self.inputs([[image] for image in images])
        return alone.keys() == inputs.keys() and all(
            _equal(alone[name], value) for name, value in inputs.items()
        )

    def _image_outputs(self, images: Sequence[np.ndarray]) -> Mapping[str, Any]:
        image_processor: Any = self.processor.image_processor
        return processed(image_processor, images=list(images), return_tensors="pt", **self.settings)

    def _for_the_model(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs of a processor that are arguments of the model, tensors on its device."""
        taken = self.facts.vision_arguments
        return on_device(
            {name: value for name, value in outputs.items() if name in taken},
            next(self.model.parameters()).device,
        )

    def token_types(self, ids: Tensor, *, shown: bool) -> dict[str, Tensor]:
        """Return the types of tokens that the model's forward takes; see `TokenTypes`."""
        if self._types is None:
            embeddings: Any = self.model.get_input_embeddings()
            count = len(embeddings.weight)
            slot = self.replacement(EXAMPLE)
            self._types = TokenTypes.of(
                self.processor, slot, self.settings, facts=self.facts, vocabulary=count
            ).to(ids.device)
        return self._types(ids, shown=shown)

    def outputs(self, features: ImageFeatures) -> dict[str, Any]:
        """Return features as the `mm_encoder_outputs` of the model's forward."""
        return encoder_outputs(features, self.held.form)


def encoder_outputs(features: ImageFeatures, form: FeatureForm) -> dict[str, Any]:
    """Return features as the `mm_encoder_outputs` of a model's forward.

    Args:
        features: Features of all images.
        form: Form in which the model takes them.
    """
    tokens: Tensor | tuple[Tensor, ...] = features.tokens
    if form.listed:
        tokens = features.tokens.split(features.counts)
    elif form.piece and not any(count % form.piece for count in features.counts):
        tokens = features.tokens.unflatten(0, (-1, form.piece))
    deepstack: list[Any] = [layer.split(features.counts) for layer in features.deepstack]
    if form.layers:
        deepstack = list(zip(form.layers, deepstack, strict=True))
    return {
        "image": SimpleNamespace(
            pooler_output=tokens,
            deepstack_features=deepstack,
            # of a loss that is not trained with (Granite Docling)
            router_logits=None,
        )
    }


def _equal(first: Any, second: Any) -> bool:
    """Return whether two outputs of a processor are equal, of which some are lists (Unlimited OCR)."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second)


def bytes_of(features: ImageFeatures) -> int:
    """Return the bytes of features."""
    tensors = (features.tokens, *features.deepstack)
    return sum(tensor.nbytes for tensor in tensors)


def joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Return `[image tokens, hidden]` of one tensor for all images or one for each."""
    if isinstance(features, Tensor):
        return features.flatten(0, -2)
    return torch.cat([image.flatten(0, -2) for image in features])
