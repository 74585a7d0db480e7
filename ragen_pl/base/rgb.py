"""Pictures of any kind as the RGB arrays that models see, and files of pictures that may be somebody else's."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

_WHITE = (255, 255, 255, 255)
_PNG, _JPEG, _RIFF = b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"RIFF"
# parts of a file, such as chunks of a PNG, each of which Pillow reads in Python; libpng writes one per 8 KiB of pixels
_MAX_PARTS = 4096
# a scan of a progressive JPEG needs a few bytes and goes over all pixels
_SCAN, _MAX_SCANS = b"\xff\xda", 100
# second bytes of a JPEG's segments that have a length, and an entry of one of Photoshop's
_WITH_LENGTH = {bytes([kind]) for kind in (*range(0xC0, 0xD0), *range(0xDB, 0xF0), 0xFE)} - {
    b"\xc8"
}
_ENTRY = b"8BIM"


class LargePictureError(ValueError):
    """A picture that would take far more time or memory than its file has bytes. The text is a clause."""


def open_picture(data: bytes, *, formats: Sequence[str], max_pixels: int) -> Image.Image:
    """Open a picture's file, whose pixels are not decoded yet.

    Args:
        data: The file.
        formats: Names of formats that are read, as Pillow has them: PNG, JPEG and WEBP have limits here.
        max_pixels: Most pixels.

    Raises:
        LargePictureError: It has more pixels, parts or scans than the limits.
        Exception: Of Pillow any, for a broken file.
    """
    if (count := data.count(_SCAN)) > _MAX_SCANS and data.startswith(_JPEG):
        raise LargePictureError(f"a JPEG of {count} scans, expected at most {_MAX_SCANS}")
    if sum(1 for _ in islice(_parts(data), _MAX_PARTS + 1)) > _MAX_PARTS:
        raise LargePictureError(f"a file of more than {_MAX_PARTS} parts")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            picture = Image.open(io.BytesIO(data), formats=tuple(formats))
    except Image.DecompressionBombError as error:
        raise LargePictureError("far too many pixels") from error
    if math.prod(picture.size) > max_pixels:
        raise LargePictureError(
            f"an image of {picture.width} x {picture.height}, expected at most {max_pixels} pixels"
        )
    return picture


def _parts(data: bytes) -> Iterator[None]:
    """Yield once for each part of a file that Pillow reads before or behind the pixels."""
    if data.startswith(_PNG):
        # length, type, content and checksum
        yield from _chunks(data, start=len(_PNG), order="big", around=12, even=False)
    elif data.startswith(_RIFF):
        # type, length and content
        yield from _chunks(data, start=12, order="little", around=8, even=True)
    elif data.startswith(_JPEG):
        yield from _segments(data)


def _chunks(
    data: bytes, *, start: int, order: Literal["big", "little"], around: int, even: bool
) -> Iterator[None]:
    of_length = slice(0, 4) if order == "big" else slice(4, 8)
    while start < len(data):
        yield
        length = int.from_bytes(data[start : start + 8][of_length], order)
        start += around + length + (length % 2 if even else 0)


def _segments(data: bytes) -> Iterator[None]:
    """Yield for each segment before the first scan, each byte between two of them, and each entry of a segment."""
    start = len(_JPEG)
    while start < len(data):
        yield
        if data.startswith(_SCAN, start):
            return
        # other bytes are taken one by one: filling, and what has no length
        has_length = data[start] == 0xFF and data[start + 1 : start + 2] in _WITH_LENGTH
        length = int.from_bytes(data[start + 2 : start + 4], "big") if has_length else 0
        end = start + (2 + max(length, 2) if has_length else 1)
        yield from repeat(None, data.count(_ENTRY, start, end))
        start = end


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
    with warnings.catch_warnings():
        # Pillow warns of each damaged entry of a file
        warnings.simplefilter("ignore")
        picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture) / 257).round().clip(0, 255).astype(np.uint8))
    if picture.has_transparency_data:
        background = Image.new("RGBA", picture.size, _WHITE)
        background.alpha_composite(picture.convert("RGBA"))
        picture = background
    return np.asarray(picture.convert("RGB"))
