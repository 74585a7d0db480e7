"""FrozenLake tiles: ice, hole, goal and footprints, each with and without the player."""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .tiles import TILE, Canvas, Color, Theme, pack


class _Palette(NamedTuple):
    ice: Color
    seam: Color
    glint: Color
    water: Color
    rim: Color
    footprint: Color
    pole: Color
    flag: Color
    field: Color
    coat: Color
    skin: Color
    dark: Color


_PALETTES = {
    Theme.DAY: _Palette(
        ice=(214, 236, 248),
        seam=(176, 208, 228),
        glint=(244, 251, 255),
        water=(18, 38, 84),
        rim=(96, 140, 184),
        footprint=(146, 132, 178),
        pole=(92, 64, 40),
        flag=(24, 150, 62),
        field=(252, 214, 84),
        coat=(214, 44, 44),
        skin=(250, 208, 168),
        dark=(60, 24, 28),
    ),
    Theme.NIGHT: _Palette(
        ice=(72, 92, 128),
        seam=(54, 70, 102),
        glint=(104, 128, 168),
        water=(6, 8, 16),
        rim=(34, 46, 72),
        footprint=(24, 26, 48),
        pole=(196, 176, 150),
        flag=(48, 96, 232),
        field=(226, 128, 44),
        coat=(238, 238, 244),
        skin=(206, 164, 128),
        dark=(40, 24, 32),
    ),
}


class FrozenLakeTile(IntEnum):
    """Tile codes without the player. `WITH_PLAYER` is added where the player stands."""

    ICE = 0
    HOLE = 1
    GOAL = 2
    TRAIL = 3


WITH_PLAYER = len(FrozenLakeTile)
"""Offset of the tile codes with the player."""


@cache
def frozen_lake_tiles(theme: Theme) -> NDArray[np.int64]:
    """Return all tiles, packed for `lay_out`."""
    colors = _PALETTES[theme]
    draw = (_ice, _hole, _goal, _trail)
    empty = [tile(colors) for tile in draw]
    occupied = [(_sunk if tile is _hole else _player)(tile(colors), colors) for tile in draw]
    return pack([canvas.pixels() for canvas in [*empty, *occupied]])


def _ice(colors: _Palette) -> Canvas:
    canvas = Canvas(colors.ice)
    canvas.line((2.5, 11, 5.5, 8), colors.glint).line((9.5, 5, 12.5, 2), colors.glint)
    return _seam(canvas, colors)


def _hole(colors: _Palette) -> Canvas:
    canvas = (
        Canvas(colors.ice)
        .ellipse((1, 1.5, 15, 14.5), colors.rim)
        .ellipse((2, 3, 14, 14), colors.water)
    )
    return _seam(canvas, colors)


def _goal(colors: _Palette) -> Canvas:
    canvas = Canvas(colors.ice).rectangle((1, 1, 15, 15), colors.field)
    canvas.rectangle((4, 2, 5.5, 14), colors.pole)
    canvas.polygon([(5.5, 2.5), (13.5, 5.5), (5.5, 8.5)], colors.flag)
    return _seam(canvas, colors)


def _trail(colors: _Palette) -> Canvas:
    canvas = _ice(colors)
    for left, top in ((1.5, 1.5), (11.5, 2.5), (2, 10.5), (11, 11)):
        canvas.ellipse((left, top, left + 3, top + 3.5), colors.footprint)
    return canvas


def _player(canvas: Canvas, colors: _Palette) -> Canvas:
    canvas.polygon([(8, 6), (12, 14), (4, 14)], colors.coat)
    canvas.ellipse((5, 1.5, 11, 8), colors.skin)
    canvas.polygon([(5, 4), (8, 0.5), (11, 4)], colors.coat)
    return canvas.rectangle((6, 4.6, 7.2, 6), colors.dark).rectangle((8.8, 4.6, 10, 6), colors.dark)


def _sunk(canvas: Canvas, colors: _Palette) -> Canvas:
    """Draw the player in a hole, with only the head above the water."""
    canvas.ellipse((5, 5, 11, 11), colors.skin).polygon([(5, 7.5), (8, 4), (11, 7.5)], colors.coat)
    return canvas.rectangle((4, 10, 12, 12), colors.water)


def _seam(canvas: Canvas, colors: _Palette) -> Canvas:
    return canvas.rectangle((0, TILE - 0.5, TILE, TILE), colors.seam).rectangle(
        (TILE - 0.5, 0, TILE, TILE), colors.seam
    )
