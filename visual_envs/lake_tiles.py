"""The tiles of the frozen lake: ice, hole, goal and footprints, with and without the player."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from visual_envs.tiles import TILE, Canvas, Colour, pack


class LakeTheme(StrEnum):
    """In what colors a lake is drawn."""

    DAY = "day"
    NIGHT = "night"


class _Palette(NamedTuple):
    ice: Colour
    seam: Colour
    glint: Colour
    water: Colour
    rim: Colour
    footprint: Colour
    pole: Colour
    flag: Colour
    field: Colour
    coat: Colour
    skin: Colour
    dark: Colour


_PALETTES = {
    LakeTheme.DAY: _Palette(
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
    LakeTheme.NIGHT: _Palette(
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


class LakeTile(IntEnum):
    """Kinds of tile; those with the player follow what the player stands on, by `WITH_PLAYER`."""

    ICE = 0
    HOLE = 1
    GOAL = 2
    TRAIL = 3


WITH_PLAYER = len(LakeTile)
"""What the player adds to the code of the tile it stands on."""


@cache
def lake_tiles(theme: LakeTheme) -> NDArray[np.int64]:
    """Return all tiles, packed for `lay_out`."""
    colours = _PALETTES[theme]
    draw = (_ice, _hole, _goal, _trail)
    empty = [tile(colours) for tile in draw]
    peopled = [(_sunk if tile is _hole else _player)(tile(colours), colours) for tile in draw]
    return pack([canvas.pixels() for canvas in [*empty, *peopled]])


def _ice(colours: _Palette) -> Canvas:
    canvas = Canvas(colours.ice)
    canvas.line((2.5, 11, 5.5, 8), colours.glint).line((9.5, 5, 12.5, 2), colours.glint)
    return _seam(canvas, colours)


def _hole(colours: _Palette) -> Canvas:
    canvas = (
        Canvas(colours.ice)
        .ellipse((1, 1.5, 15, 14.5), colours.rim)
        .ellipse((2, 3, 14, 14), colours.water)
    )
    return _seam(canvas, colours)


def _goal(colours: _Palette) -> Canvas:
    canvas = Canvas(colours.ice).rectangle((1, 1, 15, 15), colours.field)
    canvas.rectangle((4, 2, 5.5, 14), colours.pole)
    canvas.polygon([(5.5, 2.5), (13.5, 5.5), (5.5, 8.5)], colours.flag)
    return _seam(canvas, colours)


def _trail(colours: _Palette) -> Canvas:
    canvas = _ice(colours)
    for left, top in ((1.5, 1.5), (11.5, 2.5), (2, 10.5), (11, 11)):
        canvas.ellipse((left, top, left + 3, top + 3.5), colours.footprint)
    return canvas


def _player(canvas: Canvas, colours: _Palette) -> Canvas:
    canvas.polygon([(8, 6), (12, 14), (4, 14)], colours.coat)
    canvas.ellipse((5, 1.5, 11, 8), colours.skin)
    canvas.polygon([(5, 4), (8, 0.5), (11, 4)], colours.coat)
    return canvas.rectangle((6, 4.6, 7.2, 6), colours.dark).rectangle(
        (8.8, 4.6, 10, 6), colours.dark
    )


def _sunk(canvas: Canvas, colours: _Palette) -> Canvas:
    """Only the head is above the water."""
    canvas.ellipse((5, 5, 11, 11), colours.skin).polygon(
        [(5, 7.5), (8, 4), (11, 7.5)], colours.coat
    )
    return canvas.rectangle((4, 10, 12, 12), colours.water)


def _seam(canvas: Canvas, colours: _Palette) -> Canvas:
    return canvas.rectangle((0, TILE - 0.5, TILE, TILE), colours.seam).rectangle(
        (TILE - 0.5, 0, TILE, TILE), colours.seam
    )
