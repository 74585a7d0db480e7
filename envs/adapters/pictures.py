"""Pictures as the RGB arrays of observations. Without `ragen_pl`, which reads any observation's images alike."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps


def on_white(picture: Image.Image) -> NDArray[np.uint8]:
    """Return a picture as uint8 `[height, width, 3]`, its transparent parts on white.

    It is turned as its file says, and gray of 16 bits is scaled to 8.
    """
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):
        levels = np.asarray(picture) / 257
        picture = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
    if picture.has_transparency_data:
        background = Image.new("RGBA", picture.size, (255, 255, 255, 255))
        background.alpha_composite(picture.convert("RGBA"))
        picture = background
    return np.array(picture.convert("RGB"))
