"""Images as URLs that hold them, as chat APIs and vLLM servers read them."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image


def data_url(image: np.ndarray) -> str:
    """Return an image, uint8 `[height, width, 3]`, as the URL of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
