"""Images for people: enlarged by whole factors, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def enlarged(image: np.ndarray, *, factor: int) -> np.ndarray:
    """Return an image with every pixel repeated `factor` times in each direction.

    Args:
        image: uint8 `[height, width, 3]`.
        factor: Number of repetitions; values below 1 leave the image as it is.
    """
    times = max(1, factor)
    return image.repeat(times, axis=0).repeat(times, axis=1)


def beside(images: Sequence[np.ndarray], *, gap: int) -> np.ndarray:
    """Return images from left to right on white, aligned at the top.

    Args:
        images: At least one image, each uint8 `[height, width, 3]` of any size.
        gap: Pixels between two images.
    """
    height = max(image.shape[0] for image in images)
    width = sum(image.shape[1] + gap for image in images) - gap
    canvas = np.full((height, width, 3), 255, dtype=np.uint8)
    left = 0
    for image in images:
        canvas[: image.shape[0], left : left + image.shape[1]] = image
        left += image.shape[1] + gap
    return canvas
