"""Pictures for people: enlarged by whole factors, side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def enlarged(picture: np.ndarray, *, factor: int) -> np.ndarray:
    """Return a picture with every pixel repeated `factor` times each way, at least once.

    Args:
        picture: uint8 `[height, width, 3]`.
        factor: below 1 it leaves the picture as it is.
    """
    times = max(1, factor)
    return picture.repeat(times, axis=0).repeat(times, axis=1)


def beside(pictures: Sequence[np.ndarray], *, gap: int) -> np.ndarray:
    """Return pictures from left to right on white, aligned at the top, `gap` pixels apart.

    Args:
        pictures: each uint8 `[height, width, 3]`, of any size; one at least.
        gap: pixels.
    """
    height = max(picture.shape[0] for picture in pictures)
    width = sum(picture.shape[1] + gap for picture in pictures) - gap
    canvas = np.full((height, width, 3), 255, dtype=np.uint8)
    left = 0
    for picture in pictures:
        canvas[: picture.shape[0], left : left + picture.shape[1]] = picture
        left += picture.shape[1] + gap
    return canvas
