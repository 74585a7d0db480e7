"""Sokoban tiles, in the order of `envs.sokoban_text.tile_codes`."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .tiles import Canvas, Color, Theme, pack


class _Palette(NamedTuple):
    brick: Color
    mortar: Color
    floor: Color
    dust: Color
    target: Color
    wood: Color
    edge: Color
    done: Color
    done_edge: Color
    coat: Color
    skin: Color
    dark: Color


_PALETTES = {
    Theme.DAY: _Palette(
        brick=(118, 72, 58),
        mortar=(74, 44, 38),
        floor=(236, 226, 200),
        dust=(214, 202, 172),
        target=(206, 36, 92),
        wood=(216, 146, 50),
        edge=(128, 76, 16),
        done=(64, 172, 88),
        done_edge=(20, 96, 44),
        coat=(36, 84, 204),
        skin=(250, 208, 168),
        dark=(24, 28, 64),
    ),
    Theme.NIGHT: _Palette(
        brick=(150, 158, 176),
        mortar=(96, 104, 124),
        floor=(34, 36, 58),
        dust=(46, 50, 76),
        target=(244, 208, 62),
        wood=(70, 118, 148),
        edge=(24, 54, 76),
        done=(214, 92, 178),
        done_edge=(112, 30, 90),
        coat=(240, 240, 244),
        skin=(206, 164, 128),
        dark=(60, 24, 28),
    ),
}


@cache
def sokoban_tiles(theme: Theme) -> NDArray[np.int64]:
    """Return the packed tiles: wall, floor, target, box, box on target, player, player on target."""
    colors = _PALETTES[theme]
    canvases = [
        _wall(colors),
        _floor(colors),
        _target(colors),
        _box(colors, colors.wood, colors.edge),
        _box(colors, colors.done, colors.done_edge),
        _player(colors, _floor(colors)),
        _player(colors, _target(colors)),
    ]
    return pack([canvas.pixels() for canvas in canvases])


def _wall(colors: _Palette) -> Canvas:
    canvas = Canvas(colors.mortar)
    for top, lefts in ((0, (0, 8)), (4, (-4, 4, 12)), (8, (0, 8)), (12, (-4, 4, 12))):
        for left in lefts:
            canvas.rectangle((left, top, left + 7, top + 3), colors.brick)
    return canvas


def _floor(colors: _Palette) -> Canvas:
    return Canvas(colors.dust).rectangle((0, 0, 15.5, 15.5), colors.floor)


def _target(colors: _Palette) -> Canvas:
    canvas = (
        _floor(colors).ellipse((2, 2, 14, 14), colors.target).ellipse((4, 4, 12, 12), colors.floor)
    )
    return canvas.ellipse((6, 6, 10, 10), colors.target)


def _box(colors: _Palette, wood: Color, edge: Color) -> Canvas:
    canvas = _floor(colors).rectangle((1, 1, 15, 15), edge).rectangle((2.5, 2.5, 13.5, 13.5), wood)
    canvas.line((3, 3, 13, 13), edge, width=1.5)
    return canvas.line((3, 13, 13, 3), edge, width=1.5)


def _player(colors: _Palette, canvas: Canvas) -> Canvas:
    canvas.polygon([(8, 6), (12.5, 14.5), (3.5, 14.5)], colors.coat)
    canvas.ellipse((5, 2, 11, 8.5), colors.skin).rectangle((5, 1, 11, 3.5), colors.coat)
    return canvas.rectangle((6, 4.6, 7.2, 6), colors.dark).rectangle((8.8, 4.6, 10, 6), colors.dark)
