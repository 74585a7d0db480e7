"""Turns in a terminal: images as colored half-blocks, reasoning, actions and rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from ragen_pl.trajectory import EpisodeStatus, Trajectory, Turn

# the character's color is the upper pixel, its background the lower
_UPPER_HALF = "▀"
# dark to light, for a terminal without colors
_SHADES = " .:-=+*#%@"
# rows of a terminal that a turn's text needs, and of an image on a small terminal
_TEXT_ROWS, _MIN_ROWS = 9, 8


def fitted(image: np.ndarray, *, width: int) -> np.ndarray:
    """Return an image of at most `width` columns and an even number of rows, colors averaged.

    Args:
        image: uint8 `[height, width, 3]`.
        width: Columns.
    """
    height, columns = image.shape[:2]
    scale = min(1.0, width / columns)
    size = (max(1, round(columns * scale)), max(2, 2 * round(height * scale / 2)))
    if size == (columns, height):
        return image
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BOX))


def half_blocks(image: np.ndarray, *, width: int) -> Segments:
    """Return an image in color, two pixels a character.

    Args:
        image: uint8 `[height, width, 3]`.
        width: Maximum number of columns.
    """
    return Segments(list(_half_blocks(fitted(image, width=width))))


def _half_blocks(pixels: np.ndarray) -> Iterator[Segment]:
    styles: dict[tuple[int, ...], Style] = {}
    for upper, lower in zip(pixels[0::2].tolist(), pixels[1::2].tolist(), strict=True):
        for top, bottom in zip(upper, lower, strict=True):
            key = (*top, *bottom)
            if key not in styles:
                styles[key] = Style.parse(f"{_rgb(top)} on {_rgb(bottom)}")
            yield Segment(_UPPER_HALF, styles[key])
        yield Segment.line()


def _rgb(color: Sequence[int]) -> str:
    return f"rgb({','.join(map(str, color))})"


def shade_text(image: np.ndarray, *, width: int) -> str:
    """Return the brightness of an image as text, two pixels a character, for a terminal without colors.

    >>> shade_text(np.full((2, 3, 3), 255, np.uint8), width=3)
    '@@@'
    """
    brightness = fitted(image, width=width).astype(np.float64).mean(axis=2)
    rows = (brightness[0::2] + brightness[1::2]) / 2 / 255 * (len(_SHADES) - 1)
    return "\n".join("".join(_SHADES[round(level)] for level in row) for row in rows.tolist())


class Screen:
    """Shows an episode on a console.

    Args:
        console: Console to write to.
        width: Maximum number of columns of an image; on a terminal a turn fits into its rows too.
    """

    def __init__(self, console: Console, *, width: int) -> None:
        self.console, self.width = console, width

    def image(self, image: np.ndarray) -> None:
        """Show an image."""
        width = min(self.width, self.console.width, self._width_of_rows(image))
        if self.console.color_system is None:
            self.console.print(shade_text(image, width=width), markup=False, highlight=False)
        else:
            self.console.print(half_blocks(image, width=width))

    def _width_of_rows(self, image: np.ndarray) -> int:
        """Return the columns of an image that leaves room for the text of a turn on a terminal."""
        if not self.console.is_terminal:
            return self.width
        height, columns = image.shape[:2]
        rows = max(_MIN_ROWS, self.console.height - _TEXT_ROWS)
        return max(1, 2 * rows * columns // height)

    def state(self, images: Sequence[np.ndarray], text: str) -> None:
        """Show an observation."""
        for image in images:
            self.image(image)
        if text.strip():
            self.console.print(Text(printable(text)))

    def turn(self, turn: Turn, *, number: int, state_is_shown: bool = False) -> None:
        """Show a turn: its observation (unless it is shown already), reasoning, actions and reward."""
        if not state_is_shown:
            self.console.rule(f"turn {number}", align="left")
            self.state(turn.observation.images, turn.observation.text)
        if turn.think:
            self._line("think", turn.think, style="italic")
        if not turn.action_is_valid:
            self._line("response", turn.response_text, style="red")
        self._line("answer", " || ".join(turn.actions) or "no valid action", style="bold")
        effect = "" if turn.action_is_effective or not turn.actions else "  (no effect)"
        color = "green" if turn.reward > 0 else "red" if turn.reward < 0 else ""
        self._line("reward", f"{turn.reward:.2f}{effect}", style=color)

    def end(self, trajectory: Trajectory) -> None:
        """Show how the episode ended."""
        self.console.rule("end", align="left")
        self.state(trajectory.final_images, "")
        word = "success" if trajectory.success else "no success"
        # broken by its environment or a server: no outcome of the player
        if trajectory.status is EpisodeStatus.FAILED:
            word = "no outcome"
        status = str(trajectory.status).replace("_", " ")
        summary = (
            f"{word}, return {trajectory.reward:.2f} in {len(trajectory.turns)} turns ({status})"
        )
        self.console.print(Text(summary, style="bold green" if trajectory.success else "bold red"))
        if trajectory.error:
            self.console.print(Text(printable(trajectory.error), style="red"))

    def _line(self, word: str, text: str, *, style: str = "") -> None:
        self.console.print(Text.assemble((f"{word:<8}", "dim"), (printable(text), style)))


def printable(text: str) -> str:
    r"""Return text that cannot control the terminal: control characters are shown by their code.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return "".join(
        character if character.isprintable() or character in "\n\t" else ascii(character)[1:-1]
        for character in text
    )
