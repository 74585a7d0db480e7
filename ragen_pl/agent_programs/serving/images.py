"""Images in requests: data URLs of PNG, JPEG and WebP files."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import threading

import numpy as np

from ragen_pl.agent_programs.serving.errors import RequestError
from ragen_pl.base.rgb import LargePictureError, open_picture, rgb_array

_DATA_URL = re.compile(r"data:image/(png|jpeg|webp);base64,", re.IGNORECASE)
_FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 16 * 1024 * 1024


class ImageReader:
    """Read images and keep them, so that an image that comes again is the same array.

    Args:
        max_bytes: Bytes of the images that are kept, the newest ones.
    """

    def __init__(self, max_bytes: int = 256 * 1024 * 1024) -> None:
        self._images: dict[str, np.ndarray] = {}
        self._max_bytes = max_bytes
        # requests of a session are read in several threads
        self._lock = threading.Lock()

    def read(self, url: str) -> tuple[str, np.ndarray]:
        """Return the digest of a data URL's file, and its image, uint8 `[height, width, 3]`.

        Raises:
            RequestError: It is no data URL of an image in one of the formats, or the image has too many pixels.
        """
        found = _DATA_URL.match(url)
        if found is None:
            raise RequestError(
                400,
                f"image_url={url[:60]!r}: expected a data URL, data:image/png;base64,… (or jpeg, webp); no other "
                "address is read",
                code="invalid_image_url",
            )
        try:
            data = base64.b64decode(url[found.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(
                400, f"image_url: no base64 ({error})", code="invalid_image_url"
            ) from error
        digest = hashlib.sha256(data).hexdigest()
        with self._lock:
            image = self._images.pop(digest, None)
            image = self._images[digest] = _decoded(data) if image is None else image
            kept = sum(each.nbytes for each in self._images.values())
            while kept > self._max_bytes and len(self._images) > 1:
                kept -= self._images.pop(next(iter(self._images))).nbytes
        return digest, image


def _decoded(data: bytes) -> np.ndarray:
    try:
        with open_picture(data, formats=_FORMATS, max_pixels=MAX_PIXELS) as image:
            return rgb_array(image)
    except LargePictureError as error:
        raise RequestError(400, f"image_url: {error}", code="image_too_large") from error
    # Pillow raises many kinds of errors for broken files
    except Exception as error:
        raise RequestError(
            400,
            f"image_url: the file is no PNG, JPEG or WebP image ({error})",
            code="invalid_image",
        ) from error
