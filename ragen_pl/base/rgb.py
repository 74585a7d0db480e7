"""Pictures of any kind as the RGB arrays that models see."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps

_WHITE = (255, 255, 255, 255)


def rgb_array(picture: Image.Image | np.ndarray) -> np.ndarray:
    """Return a picture as uint8 `[height, width, 3]`, its transparent parts on white.

    A picture is turned as its file says, as transformers reads it, and gray of 16 bits is scaled to 8: Pillow would cut
    it, and most of it would be white.

    Without a background, the colors of transparent pixels would show, which are black in most files: black lines on a
    clear ground would be all black.

    Args:
        picture: Pillow's image of any mode, or uint8 `[height, width]` for gray, `[height, width, channels]` for gray
            (1), gray with alpha (2), RGB (3) or RGB with alpha (4).

    Raises:
        ValueError: It is another array, or has no pixels.

    >>> rgb_array(np.array([[[0, 0, 0, 0], [0, 0, 0, 255]]], np.uint8)).tolist()
    [[[255, 255, 255], [0, 0, 0]]]
    """
    if isinstance(picture, np.ndarray):
        channels = 1 if picture.ndim == 2 else picture.shape[-1] if picture.ndim == 3 else 0
        if picture.dtype != np.uint8 or not 1 <= channels <= 4 or not picture.size:
            raise ValueError(
                f"an image of shape {picture.shape} and type {picture.dtype}; expected uint8 [height, width, 3], "
                "[height, width, 4] with alpha, or [height, width] for gray, with at least one pixel"
            )
        if channels == 3:
            return picture
        gray = picture.reshape(picture.shape[:2]) if channels == 1 else picture
        picture = Image.fromarray(np.ascontiguousarray(gray))
    if not picture.width or not picture.height:
        raise ValueError(f"an image of {picture.width} x {picture.height} pixels")
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture) / 257).round().clip(0, 255).astype(np.uint8))
    if picture.has_transparency_data:
        background = Image.new("RGBA", picture.size, _WHITE)
        background.alpha_composite(picture.convert("RGBA"))
        picture = background
    return np.asarray(picture.convert("RGB"))
