"""The tiles of the frozen lake: ice, hole, goal and footprints, with and without the player."""

from __future__ import annotations

from enum import IntEnum
from functools import cache

import numpy as np
from numpy.typing import NDArray

from visual_envs.tiles import TILE, Canvas, Colour, pack

_ICE: Colour = (214, 236, 248)
_SEAM: Colour = (176, 208, 228)
_GLINT: Colour = (244, 251, 255)
_WATER: Colour = (18, 38, 84)
_RIM: Colour = (96, 140, 184)
_PRINT: Colour = (146, 132, 178)
_POLE: Colour = (92, 64, 40)
_FLAG: Colour = (24, 150, 62)
_SNOW: Colour = (252, 214, 84)
_COAT: Colour = (214, 44, 44)
_SKIN: Colour = (250, 208, 168)
_DARK: Colour = (60, 24, 28)


class LakeTile(IntEnum):
    """Kinds of tile; those with the player follow what the player stands on, by `WITH_PLAYER`."""

    ICE = 0
    HOLE = 1
    GOAL = 2
    TRAIL = 3


WITH_PLAYER = len(LakeTile)
"""What the player adds to the code of the tile it stands on."""


@cache
def lake_tiles() -> NDArray[np.int64]:
    """Return all tiles, packed for `lay_out`."""
    empty = [_ice(), _hole(), _goal(), _trail()]
    peopled = [_player(_ice()), _sunk(_hole()), _player(_goal()), _player(_trail())]
    return pack([canvas.pixels() for canvas in [*empty, *peopled]])


def _ice() -> Canvas:
    canvas = Canvas(_ICE)
    canvas.line((2.5, 11, 5.5, 8), _GLINT).line((9.5, 5, 12.5, 2), _GLINT)
    return _seam(canvas)


def _hole() -> Canvas:
    canvas = Canvas(_ICE).ellipse((1, 1.5, 15, 14.5), _RIM).ellipse((2, 3, 14, 14), _WATER)
    return _seam(canvas)


def _goal() -> Canvas:
    canvas = Canvas(_ICE).rectangle((1, 1, 15, 15), _SNOW)
    canvas.rectangle((4, 2, 5.5, 14), _POLE)
    canvas.polygon([(5.5, 2.5), (13.5, 5.5), (5.5, 8.5)], _FLAG)
    return _seam(canvas)


def _trail() -> Canvas:
    canvas = _ice()
    for left, top in ((1.5, 1.5), (11.5, 2.5), (2, 10.5), (11, 11)):
        canvas.ellipse((left, top, left + 3, top + 3.5), _PRINT)
    return canvas


def _player(canvas: Canvas) -> Canvas:
    canvas.polygon([(8, 6), (12, 14), (4, 14)], _COAT)
    canvas.ellipse((5, 1.5, 11, 8), _SKIN)
    canvas.polygon([(5, 4), (8, 0.5), (11, 4)], _COAT)
    return canvas.rectangle((6, 4.6, 7.2, 6), _DARK).rectangle((8.8, 4.6, 10, 6), _DARK)


def _sunk(canvas: Canvas) -> Canvas:
    """Only the head is above the water."""
    canvas.ellipse((5, 5, 11, 11), _SKIN).polygon([(5, 7.5), (8, 4), (11, 7.5)], _COAT)
    return canvas.rectangle((4, 10, 12, 12), _WATER)


def _seam(canvas: Canvas) -> Canvas:
    return canvas.rectangle((0, TILE - 0.5, TILE, TILE), _SEAM).rectangle(
        (TILE - 0.5, 0, TILE, TILE), _SEAM
    )
