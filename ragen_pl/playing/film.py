"""An episode as a film (GIF) or a strip (PNG): one frame a turn with the image or text, response and reward."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ragen_pl.trajectory import Trajectory, Turn
from ragen_pl.viewing.images import beside, enlarged

# Pixels: the longer side of an enlarged image (approximately), the height of a line, the margin.
_SIDE = 288
_LINE = 18
_PAD = 8
_LETTERS_PER_LINE = 40
# a GIF has no more than 65,535 rows of pixels
_LINES = 200
_FRAMES_PER_ROW = 5
# Milliseconds; the last frame is shown three times as long.
_FRAME_DURATION = 900


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of a frame: an image, if there is one, above lines of text."""

    image: Image.Image | None
    lines: list[str]


def save_episode(trajectory: Trajectory, path: Path) -> Path:
    """Write an episode as a GIF or as a PNG strip, depending on the file's suffix, and return the path.

    Raises:
        ValueError: The suffix is neither .gif nor .png, or the episode has no turn.
    """
    if not trajectory.turns:
        raise ValueError("the episode has no turn to draw")
    frames = episode_frames(trajectory)
    match path.suffix.lower():
        case ".gif":
            times = [_FRAME_DURATION] * (len(frames) - 1) + [3 * _FRAME_DURATION]
            frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0)
        case ".png":
            _strip(frames).save(path)
        case suffix:
            raise ValueError(f"found {suffix!r} in {path}, expected .gif or .png")
    return path


def episode_frames(trajectory: Trajectory) -> list[Image.Image]:
    """Return one frame a turn and one for the end, all of the same size."""
    contents = [_turn_content(turn, number) for number, turn in enumerate(trajectory.turns, 1)]
    outcome = "success" if trajectory.success else "no success"
    end = ["end", f"{outcome}, return {trajectory.reward:.2f}"]
    contents.append(_Content(_image(trajectory.final_images), _wrapped(end)))
    images = [content.image for content in contents if content.image is not None]
    width = max([_SIDE, *(image.width for image in images)]) + 2 * _PAD
    top = max([0, *(image.height + _PAD for image in images)])
    height = top + _LINE * max(len(content.lines) for content in contents) + 2 * _PAD
    return [_frame(content, size=(width, height), top=top) for content in contents]


def _turn_content(turn: Turn, number: int) -> _Content:
    answer = " || ".join(turn.actions) or f"invalid: {turn.response_text}"
    lines = [
        f"turn {number}",
        f"think: {turn.think or '-'}",
        f"answer: {answer}",
        f"reward: {turn.reward:.2f}",
    ]
    if not turn.observation.images:
        lines[1:1] = turn.observation.text.splitlines()
    return _Content(_image(turn.observation.images), _wrapped(lines))


def _wrapped(lines: Sequence[str]) -> list[str]:
    parts = [part for line in lines for part in textwrap.wrap(line, _LETTERS_PER_LINE) or [""]]
    cut = len(parts) - _LINES
    return parts if cut <= 0 else [*parts[: _LINES // 2], "…", *parts[_LINES // 2 + cut + 1 :]]


def _image(images: Sequence[np.ndarray]) -> Image.Image | None:
    """Return images side by side, enlarged by whole factors; None if there are none."""
    if not images:
        return None
    large = [enlarged(image, factor=_SIDE // max(image.shape[:2])) for image in images]
    return Image.fromarray(beside(large, gap=_PAD))


def _frame(content: _Content, *, size: tuple[int, int], top: int) -> Image.Image:
    frame = Image.new("RGB", size, "white")
    if content.image is not None:
        frame.paste(content.image, (_PAD, _PAD))
    draw = ImageDraw.Draw(frame)
    font = ImageFont.load_default(size=13)
    for row, line in enumerate(content.lines):
        color = "black" if row else "#5b6472"
        draw.text((_PAD, _PAD + top + row * _LINE), line, fill=color, font=font)
    return frame


def _strip(frames: Sequence[Image.Image]) -> Image.Image:
    width, height = frames[0].size
    columns = min(_FRAMES_PER_ROW, len(frames))
    canvas = Image.new("RGB", (columns * width, -(-len(frames) // columns) * height), "white")
    for number, frame in enumerate(frames):
        canvas.paste(frame, (number % columns * width, number // columns * height))
    return canvas
