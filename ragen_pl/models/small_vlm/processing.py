"""The processor: images to tensors, and one image token for each image to one for each feature."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature, PreTrainedTokenizerBase
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin

from ragen_pl.base.rgb import rgb_array

log = logging.getLogger(__name__)


def read_size(
    height: int, width: int, *, patch_size: int, max_cells: int | None
) -> tuple[int, int]:
    """Return height and width, in pixels, at which the model reads an image: whole cells, `max_cells` at most.

    A size of whole cells is kept. Any other is first scaled down as a whole, proportions kept, if its longer side has
    more than `max_cells` cells; then each side is rounded to the nearest number of cells, half a cell up, at least one.

    Args:
        height: Height of the image in pixels.
        width: Its width.
        patch_size: Pixels along a cell's side.
        max_cells: Largest number of cells along a side; None for any number.
    """
    longest = max(height, width)
    limit = longest if max_cells is None else min(longest, patch_size * max_cells)
    # in whole numbers, so that every machine rounds alike
    unit = longest * patch_size
    cells = [max(1, (2 * side * limit + unit) // (2 * unit)) for side in (height, width)]
    return cells[0] * patch_size, cells[1] * patch_size


class SmallVLMImageProcessor(BaseImageProcessor):
    """Stack images of one size. Sizes that the model does not take are scaled first, see `read_size`.

    The model scales the values.

    Args:
        patch_size: Pixels along a cell's side.
        max_cells: Largest number of cells along a side; None for any number, as in folders saved without it.
    """

    model_input_names = ["pixel_values"]  # noqa: RUF012 - as in transformers

    def __init__(self, patch_size: int = 16, max_cells: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.patch_size, self.max_cells = patch_size, max_cells

    def __call__(  # type: ignore[override] # transformers' own takes every option of every processor
        self, images: Any, return_tensors: str = "pt", **_: Any
    ) -> BatchFeature:
        """Return uint8 `pixel_values` `[images, 3, height, width]`.

        Args:
            images: PIL images or uint8 arrays `[height, width, 3]` of one size, one or a sequence.
            return_tensors: `"pt"` or `"np"`.

        Raises:
            ValueError: The images differ in size, have not three channels, have no pixels or are not of bytes.
        """
        arrays = [self._scaled(_array(image)) for image in _listed(images)]
        shapes = sorted({array.shape for array in arrays})
        if len(shapes) != 1 or len(shapes[0]) != 3 or shapes[0][-1] != 3 or 0 in shapes[0]:
            raise ValueError(
                f"found images of shapes {shapes}, expected one shape [height, width, 3]; "
                "pass images of different sizes one size at a time"
            )
        pixels = np.stack(arrays).transpose(0, 3, 1, 2)
        values = torch.from_numpy(pixels).contiguous() if return_tensors == "pt" else pixels
        return BatchFeature({"pixel_values": values})

    def _scaled(self, image: np.ndarray) -> np.ndarray:
        """Return an image at the size at which the model reads it, by Pillow's bilinear filter."""
        if image.ndim != 3 or image.shape[-1] != 3 or 0 in image.shape:
            return image
        size = height, width = image.shape[:2]
        read = read_size(height, width, patch_size=self.patch_size, max_cells=self.max_cells)
        if read == size:
            return image
        _report_scaling(self.patch_size, self.max_cells)
        return np.asarray(
            Image.fromarray(image).resize(read[::-1], resample=Image.Resampling.BILINEAR)
        )

    def num_image_tokens(self, height: int, width: int) -> int:
        """Return the number of features of an image at a size at which the model reads it."""
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
        self, images: Any = None, text: Any = None, *, return_tensors: str = "pt", **kwargs: Any
    ) -> BatchFeature:
        """Encode texts with one `<|image|>` for each image, and the images in their order, to tensors.

        Raises:
            ValueError: The texts have more or fewer places for images than there are images.
        """
        if text is not None:
            places = sum(
                one.count(self.image_token) for one in ([text] if isinstance(text, str) else text)
            )
            count = 0 if images is None else len(_listed(images))
            if places != count:
                raise ValueError(
                    f"found {places} {self.image_token} tokens and {count} images, expected as many"
                )
        features: BatchFeature = super().__call__(
            images, text, return_tensors=return_tensors, **kwargs
        )
        return features

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **_: Any) -> str:
        """Return the text of an image's slot: one image token for each feature."""
        height, width = image_inputs["pixel_values"][image_idx].shape[-2:]
        count: int = self.image_processor.num_image_tokens(height, width)
        return self.image_token * count


@cache
def _report_scaling(patch_size: int, max_cells: int | None) -> None:
    """Log once in a process that images are scaled."""
    limit = "" if max_cells is None else f" up to {patch_size * max_cells}"
    log.info(
        "images are scaled to multiples of %d pixels%s, which the model takes", patch_size, limit
    )


def _listed(images: Any) -> list[Any]:
    """Return the images of an array `[images, height, width, 3]`, a list or a list for each text."""
    if isinstance(images, np.ndarray) and images.ndim == 4:
        return list(images)
    if not isinstance(images, Sequence):
        return [images]
    return [image for part in images for image in (part if isinstance(part, list) else [part])]


def _array(image: Any) -> np.ndarray:
    if not isinstance(image, np.ndarray):
        return rgb_array(image)
    if image.dtype != np.uint8:
        raise ValueError(f"found an image of {image.dtype}, expected uint8 from 0 to 255")
    return image
