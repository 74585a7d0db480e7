"""The processor: pictures to tensors, and one image id a picture to one id a feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, PreTrainedTokenizerBase
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import MultiModalData, ProcessorMixin


class SmallVLMImageProcessor(BaseImageProcessor):
    """Stack pictures of one size, as they are: the model scales them itself.

    Args:
        patch_size: pixels along a cell's side.
    """

    model_input_names = ["pixel_values"]  # noqa: RUF012 - transformers' own convention

    def __init__(self, patch_size: int = 16, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.patch_size = patch_size

    def __call__(self, images: Any, return_tensors: str = "pt", **_: Any) -> BatchFeature:
        """Return uint8 `pixel_values` `[pictures, 3, height, width]` of PIL pictures or `[height, width, 3]` arrays."""
        listed = list(images) if isinstance(images, Sequence) else [images]
        arrays = [np.asarray(image, dtype=np.uint8) for image in listed]
        sizes = {array.shape for array in arrays}
        if len(sizes) != 1 or any(len(size) != 3 or size[-1] != 3 for size in sizes):
            raise ValueError(
                f"found pictures of shapes {sorted(sizes)}; expected one shape [height, width, 3]"
            )
        pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous()
        return BatchFeature({"pixel_values": pixels if return_tensors == "pt" else pixels.numpy()})

    def num_image_tokens(self, height: int, width: int) -> int:
        """Return how many features a picture has."""
        return (height // self.patch_size) * (width // self.patch_size)


class SmallVLMProcessor(ProcessorMixin):
    """Joins the image processor and the tokenizer."""

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
        """Encode texts with one `<|image|>` a picture, and the pictures in the order of the texts."""
        texts = [text] if isinstance(text, str) else list(text or [])
        data: dict[str, Any] = {}
        if images is not None:
            listed = list(images) if isinstance(images, Sequence) else [images]
            data |= self.image_processor(listed)
            texts = self._expanded(texts, [np.asarray(image).shape for image in listed])
        if texts:
            data |= self.tokenizer(texts, return_tensors=return_tensors, **kwargs)
        return BatchFeature(data)

    def _expanded(self, texts: list[str], shapes: list[tuple[int, ...]]) -> list[str]:
        found = sum(text.count(self.image_token) for text in texts)
        if found != len(shapes):
            raise ValueError(
                f"found {found} {self.image_token} in the text for {len(shapes)} pictures"
            )
        counts = iter([self.image_processor.num_image_tokens(*shape[:2]) for shape in shapes])
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
