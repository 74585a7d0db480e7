"""Drawing square tiles with Pillow, once, and laying images out of them with numpy.

Tiles are drawn large and scaled down, so that their edges are smooth at 16 pixels. What the tiles
of an environment look like stands in `visual_envs.lake_tiles` and `visual_envs.sokoban_tiles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

TILE = 16
"""Height and width of a tile in pixels."""

_SCALE = 8

Colour = tuple[int, int, int]
Box = tuple[float, float, float, float]


class Canvas:
    """A tile in the making, measured in pixels of the finished tile; drawing calls chain."""

    def __init__(self, ground: Colour) -> None:
        self._image = Image.new("RGB", (TILE * _SCALE, TILE * _SCALE), ground)
        self._draw = ImageDraw.Draw(self._image)

    def rectangle(self, box: Box, color: Colour) -> Self:
        """Fill left, top, right, bottom."""
        left, top, right, bottom = (side * _SCALE for side in box)
        self._draw.rectangle((left, top, right - 1, bottom - 1), fill=color)
        return self

    def ellipse(self, box: Box, color: Colour) -> Self:
        """Fill the ellipse inside left, top, right, bottom."""
        left, top, right, bottom = (side * _SCALE for side in box)
        self._draw.ellipse((left, top, right - 1, bottom - 1), fill=color)
        return self

    def polygon(self, points: Sequence[tuple[float, float]], color: Colour) -> Self:
        """Fill a polygon of (x, y) points."""
        self._draw.polygon([(x * _SCALE, y * _SCALE) for x, y in points], fill=color)
        return self

    def line(self, box: Box, color: Colour, *, width: float = 1.0) -> Self:
        """Draw a line between two points."""
        ends = [side * _SCALE for side in box]
        self._draw.line(ends, fill=color, width=round(width * _SCALE))
        return self

    def pixels(self) -> NDArray[np.uint8]:
        """Return the finished tile, `[TILE, TILE, 3]`."""
        return np.asarray(self._image.resize((TILE, TILE), Image.Resampling.BOX))


def pack(tiles: Sequence[NDArray[np.uint8]]) -> NDArray[np.int64]:
    """Return tiles as `[kinds, TILE, TILE * 3 / 8]` words of eight bytes, for `lay_out`.

    Words, because numpy copies element by element where memory is not contiguous.
    """
    return np.stack(tiles).reshape(len(tiles), TILE, TILE * 3).view(np.int64)


def lay_out(packed: NDArray[np.int64], codes: NDArray[np.intp], *, size: int) -> NDArray[np.uint8]:
    """Return the image of a square grid of tiles, a new array.

    Args:
        packed: from `pack`.
        codes: the kind of tile of each cell, row by row, `[size * size]`.
        size: rows and columns.

    Returns:
        RGB, `[size * TILE, size * TILE, 3]`.
    """
    rows = packed[codes].reshape(size, size, TILE, -1).transpose(0, 2, 1, 3)
    side = size * TILE
    return rows.reshape(side, -1).view(np.uint8).reshape(side, side, 3)
