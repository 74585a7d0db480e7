"""Sokoban tiles, in the order of `envs.sokoban_text.tile_codes`."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from visual_envs.tiles import Canvas, Color, pack

_BRICK: Color = (118, 72, 58)
_MORTAR: Color = (74, 44, 38)
_FLOOR: Color = (236, 226, 200)
_DUST: Color = (214, 202, 172)
_TARGET: Color = (206, 36, 92)
_WOOD: Color = (216, 146, 50)
_EDGE: Color = (128, 76, 16)
_DONE: Color = (64, 172, 88)
_DONE_EDGE: Color = (20, 96, 44)
_COAT: Color = (36, 84, 204)
_SKIN: Color = (250, 208, 168)
_DARK: Color = (24, 28, 64)


@cache
def sokoban_tiles() -> NDArray[np.int64]:
    """Return the packed tiles: wall, floor, target, box, box on target, player, player on target."""
    canvases = [
        _wall(),
        _floor(),
        _target(),
        _box(_WOOD, _EDGE),
        _box(_DONE, _DONE_EDGE),
        _player(_floor()),
        _player(_target()),
    ]
    return pack([canvas.pixels() for canvas in canvases])


def _wall() -> Canvas:
    canvas = Canvas(_MORTAR)
    for top, lefts in ((0, (0, 8)), (4, (-4, 4, 12)), (8, (0, 8)), (12, (-4, 4, 12))):
        for left in lefts:
            canvas.rectangle((left, top, left + 7, top + 3), _BRICK)
    return canvas


def _floor() -> Canvas:
    return Canvas(_DUST).rectangle((0, 0, 15.5, 15.5), _FLOOR)


def _target() -> Canvas:
    canvas = _floor().ellipse((2, 2, 14, 14), _TARGET).ellipse((4, 4, 12, 12), _FLOOR)
    return canvas.ellipse((6, 6, 10, 10), _TARGET)


def _box(wood: Color, edge: Color) -> Canvas:
    canvas = _floor().rectangle((1, 1, 15, 15), edge).rectangle((2.5, 2.5, 13.5, 13.5), wood)
    canvas.line((3, 3, 13, 13), edge, width=1.5)
    return canvas.line((3, 13, 13, 3), edge, width=1.5)


def _player(canvas: Canvas) -> Canvas:
    canvas.polygon([(8, 6), (12.5, 14.5), (3.5, 14.5)], _COAT)
    canvas.ellipse((5, 2, 11, 8.5), _SKIN).rectangle((5, 1, 11, 3.5), _COAT)
    return canvas.rectangle((6, 4.6, 7.2, 6), _DARK).rectangle((8.8, 4.6, 10, 6), _DARK)
