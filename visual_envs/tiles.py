"""Square tiles drawn once with Pillow, and images composed of them with numpy.

Tiles are drawn at a larger scale and reduced, which smooths their edges. The tiles of each environment are in
`visual_envs.frozen_lake_tiles` and `visual_envs.sokoban_tiles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

TILE = 16
"""Height and width of a tile in pixels."""

_SCALE = 8

Color = tuple[int, int, int]
Box = tuple[float, float, float, float]


class Theme(StrEnum):
    """Color theme of tiles: the one used in training, or the same shapes in other colors."""

    DAY = "day"
    NIGHT = "night"


class Canvas:
    """Drawing surface of one tile. Coordinates are pixels of the finished tile; calls can be chained."""

    def __init__(self, ground: Color) -> None:
        self._image = Image.new("RGB", (TILE * _SCALE, TILE * _SCALE), ground)
        self._draw = ImageDraw.Draw(self._image)

    def rectangle(self, box: Box, color: Color) -> Self:
        """Fill the rectangle (left, top, right, bottom)."""
        left, top, right, bottom = (side * _SCALE for side in box)
        self._draw.rectangle((left, top, right - 1, bottom - 1), fill=color)
        return self

    def ellipse(self, box: Box, color: Color) -> Self:
        """Fill the ellipse inside the rectangle (left, top, right, bottom)."""
        left, top, right, bottom = (side * _SCALE for side in box)
        self._draw.ellipse((left, top, right - 1, bottom - 1), fill=color)
        return self

    def polygon(self, points: Sequence[tuple[float, float]], color: Color) -> Self:
        """Fill a polygon of (x, y) points."""
        self._draw.polygon([(x * _SCALE, y * _SCALE) for x, y in points], fill=color)
        return self

    def line(self, box: Box, color: Color, *, width: float = 1.0) -> Self:
        """Draw a line between two points."""
        ends = [side * _SCALE for side in box]
        self._draw.line(ends, fill=color, width=round(width * _SCALE))
        return self

    def pixels(self) -> NDArray[np.uint8]:
        """Return the finished tile, `[TILE, TILE, 3]`."""
        return np.asarray(self._image.resize((TILE, TILE), Image.Resampling.BOX))


def pack(tiles: Sequence[NDArray[np.uint8]]) -> NDArray[np.int64]:
    """Return the tiles as eight-byte words, `[kinds, TILE, TILE * 3 / 8]`, for `lay_out`.

    numpy copies non-contiguous memory element by element, and larger elements make it faster.
    """
    return np.stack(tiles).reshape(len(tiles), TILE, TILE * 3).view(np.int64)


def lay_out(
    packed: NDArray[np.int64],
    codes: NDArray[np.intp],
    *,
    size: int,
    largest: int | None = None,
    scale: int = 1,
) -> NDArray[np.uint8]:
    """Return a new image of a square grid of tiles.

    Args:
        packed: Tiles returned by `pack`.
        codes: Tile code of each cell, row by row, `[size * size]`.
        size: Number of rows and columns.
        largest: Rows and columns of the image, black beyond the grid; None for those of the grid.
        scale: Factor of height and width.

    Returns:
        RGB, `[largest * TILE * scale, largest * TILE * scale, 3]`.
    """
    rows = packed[codes].reshape(size, size, TILE, -1).transpose(0, 2, 1, 3)
    side = size * TILE
    image = rows.reshape(side, -1).view(np.uint8).reshape(side, side, 3)
    if largest is not None and largest > size:
        beyond = (largest - size) * TILE
        image = np.pad(image, ((0, beyond), (0, beyond), (0, 0)))
    return image if scale == 1 else image.repeat(scale, axis=0).repeat(scale, axis=1)
