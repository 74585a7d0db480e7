"""The processor: images to tensors, and one image token for each image to one for each feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, PreTrainedTokenizerBase
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import MultiModalData, ProcessorMixin


class SmallVLMImageProcessor(BaseImageProcessor):
    """Stack images of one size without scaling, which the model does.

    Args:
        patch_size: Pixels along a cell's side.
    """

    model_input_names = ["pixel_values"]  # noqa: RUF012 - as in transformers

    def __init__(self, patch_size: int = 16, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.patch_size = patch_size

    def __call__(  # type: ignore[override] # transformers' own takes every option of every processor
        self, images: Any, return_tensors: str = "pt", **_: Any
    ) -> BatchFeature:
        """Return uint8 `pixel_values` `[images, 3, height, width]`.

        Args:
            images: PIL images or uint8 arrays `[height, width, 3]` of one size, one or a sequence.
            return_tensors: `"pt"` or `"np"`.

        Raises:
            ValueError: The images differ in size, have not three channels or are not of bytes.
        """
        arrays = [_array(image) for image in _listed(images)]
        shapes = sorted({array.shape for array in arrays})
        if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][-1] != 3:
            raise ValueError(
                f"found images of shapes {shapes}, expected one shape [height, width, 3]; "
                "pass images of different sizes one size at a time"
            )
        pixels = np.stack(arrays).transpose(0, 3, 1, 2)
        values = torch.from_numpy(pixels).contiguous() if return_tensors == "pt" else pixels
        return BatchFeature({"pixel_values": values})

    def num_image_tokens(self, height: int, width: int) -> int:
        """Return the number of features of an image."""
        return (height // self.patch_size) * (width // self.patch_size)


class SmallVLMProcessor(ProcessorMixin):
    """Image processor and tokenizer in one."""

    def __init__(
        self,
        image_processor: SmallVLMImageProcessor,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        image_token: str = "<|image|>",
        **_: Any,
    ) -> None:
        self.image_token = image_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(
        self,
        images: Any = None,
        text: str | list[str] | None = None,
        return_tensors: str = "pt",
        **kwargs: Any,
    ) -> BatchFeature:
        """Encode texts with one `<|image|>` for each image, and the images in their order."""
        texts = [text] if isinstance(text, str) else list(text or [])
        data: dict[str, Any] = {}
        sizes: list[Sequence[int]] = []
        if images is not None:
            pixels = self.image_processor(images, return_tensors=return_tensors)["pixel_values"]
            data["pixel_values"] = pixels
            sizes = [pixels.shape[2:]] * len(pixels)
        if texts:
            texts = self._expanded(texts, sizes)
            data |= self.tokenizer(texts, return_tensors=return_tensors, **kwargs)
        return BatchFeature(data)

    def _expanded(self, texts: list[str], sizes: Sequence[Sequence[int]]) -> list[str]:
        count = sum(text.count(self.image_token) for text in texts)
        if count != len(sizes):
            raise ValueError(
                f"found {count} {self.image_token} in the text for {len(sizes)} images"
            )
        counts = iter([self.image_processor.num_image_tokens(*size) for size in sizes])
        return [
            "".join(
                part if number == 0 else self.image_token * next(counts) + part
                for number, part in enumerate(text.split(self.image_token))
            )
            for text in texts
        ]

    def _get_num_multimodal_tokens(
        self, image_sizes: list[list[int]] | None = None, **_: Any
    ) -> MultiModalData:
        counts = [self.image_processor.num_image_tokens(*size) for size in image_sizes or []]
        return MultiModalData(num_image_tokens=counts, num_image_patches=[1] * len(counts))


def _listed(images: Any) -> list[Any]:
    if isinstance(images, np.ndarray) and images.ndim == 4:
        return list(images)
    return list(images) if isinstance(images, Sequence) else [images]


def _array(image: Any) -> np.ndarray:
    if not isinstance(image, np.ndarray):
        return np.asarray(image.convert("RGB"))
    if image.dtype != np.uint8:
        raise ValueError(f"found an image of {image.dtype}, expected uint8 from 0 to 255")
    return image
