"""An episode as a film (GIF) or a strip (PNG): each turn's image, or text, with what was said of it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ragen_pl.trajectory import Trajectory
from ragen_pl.viewing.images import beside, enlarged

_SIDE = 288  # pixels that an image is enlarged to, about
_LINE = 18
_PAD = 8
_COLUMNS = 40  # letters of a line
_STRIP_COLUMNS = 5
_MS = 900  # of a frame; the last one stays longer


def save_episode(trajectory: Trajectory, path: Path) -> Path:
    """Write an episode as a GIF or, by the file's ending, as a PNG strip, and return the path.

    Raises:
        ValueError: the file's ending is another, or there is no turn.
    """
    if not trajectory.turns:
        raise ValueError("the episode has no turn to draw")
    frames = episode_frames(trajectory)
    match path.suffix.lower():
        case ".gif":
            times = [_MS] * (len(frames) - 1) + [3 * _MS]
            frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0)
        case ".png":
            _strip(frames).save(path)
        case other:
            raise ValueError(f"found {other!r} in {path}, expected .gif or .png")
    return path


def episode_frames(trajectory: Trajectory) -> list[Image.Image]:
    """Return a frame for each turn and one for the end, all of one size."""
    told: list[tuple[Sequence[np.ndarray], list[str]]] = []
    for number, turn in enumerate(trajectory.turns, start=1):
        answer = " || ".join(turn.actions) or f"invalid: {turn.response_text}"
        lines = [
            f"turn {number}",
            f"think: {turn.think or '-'}",
            f"answer: {answer}",
            f"reward: {turn.reward:.2f}",
        ]
        if not turn.observation.images:
            lines[1:1] = turn.observation.text.splitlines()
        told.append((turn.observation.images, lines))
    word = "success" if trajectory.success else "no success"
    told.append((trajectory.final_images, ["end", f"{word}, return {trajectory.reward:.2f}"]))
    wrapped = [(images, _wrapped(lines)) for images, lines in told]
    images = [_beside(images) if images else None for images, _ in wrapped]
    width = max([_SIDE, *(one.width for one in images if one is not None)]) + 2 * _PAD
    top = max([0, *(one.height + _PAD for one in images if one is not None)])
    height = top + _LINE * max(len(lines) for _, lines in wrapped) + 2 * _PAD
    return [
        _frame(image, lines, size=(width, height), top=top)
        for image, (_, lines) in zip(images, wrapped, strict=True)
    ]


def _wrapped(lines: Sequence[str]) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, _COLUMNS) or [""]]


def _frame(
    image: Image.Image | None, lines: Sequence[str], *, size: tuple[int, int], top: int
) -> Image.Image:
    frame = Image.new("RGB", size, "white")
    if image is not None:
        frame.paste(image, (_PAD, _PAD))
    draw = ImageDraw.Draw(frame)
    font = ImageFont.load_default(size=13)
    for row, line in enumerate(lines):
        color = "black" if row else "#5b6472"
        draw.text((_PAD, _PAD + top + row * _LINE), line, fill=color, font=font)
    return frame


def _beside(images: Sequence[np.ndarray]) -> Image.Image:
    """Return a turn's images side by side, enlarged by whole factors."""
    large = [enlarged(image, factor=_SIDE // max(image.shape[:2])) for image in images]
    return Image.fromarray(beside(large, gap=_PAD))


def _strip(frames: Sequence[Image.Image]) -> Image.Image:
    width, height = frames[0].size
    columns = min(_STRIP_COLUMNS, len(frames))
    canvas = Image.new("RGB", (columns * width, -(-len(frames) // columns) * height), "white")
    for number, frame in enumerate(frames):
        canvas.paste(frame, (number % columns * width, number // columns * height))
    return canvas
