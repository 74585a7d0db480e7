"""Reconstruction of an image as SVG. The reading and rendering of SVG is in `visual_envs.svg_images`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from gymnasium import spaces

from ..envs.adapters.optional import optional_import
from ..envs.base import TEXT_CHARSET, Count, Environment, Observation, checked_arguments
from .svg_images import (
    Drawing,
    RGBImage,
    SvgError,
    color_match,
    outline_match,
    read_svg,
    render,
)

COLORS = ("red", "lime", "blue", "purple")
"""Colours at nearly the same distance from white."""

KINDS = ("square", "circle")
# a shape drawn wrongly costs more than this of any image of up to eight shapes
_SOLVED = 0.98
_OUTLINE, _COLOR, _SOLVED_REWARD = 0.25, 0.25, 0.5
_CELL = 16
_MAX_ACTION = 2000
_TEXT_LENGTH = 20

Size = Annotated[int, Interval(ge=3, le=8)]
ShapeCount = Annotated[int, Interval(ge=1, le=8)]


@dataclass(frozen=True, order=True)
class Shape:
    """A square or circle that fills a cell."""

    row: int
    column: int
    kind: str
    color: str

    def svg(self) -> str:
        """Return the shape as SVG in units of cells."""
        if self.kind == "square":
            place = f'rect x="{self.column}" y="{self.row}" width="1" height="1"'
        else:
            place = f'circle cx="{self.column}.5" cy="{self.row}.5" r="0.5"'
        return f'<{place} fill="{self.color}"/>'


class Svg(Environment):
    """Write the SVG of an image.

    ## Description
    An image shows a few coloured shapes, each in a cell of a grid. The agent answers with SVG, sees the rendering
    next to the image and may answer again; each answer is a whole image. The canvas is `0 0 size size`: a cell is
    one unit. An SVG document with a square `viewBox` of its own is accepted, too.

    ## Action Space
    `Text(2000)`: an SVG document, or its shapes without the element around them. Accepted are g, rect, circle, ellipse,
    line, polygon, polyline and path with numbers, fill, stroke and opacity. At most 64 elements are accepted, none of
    which reaches 30,000 pixels beyond the canvas.

    ## Observation Space
    `Dict(text=Text, images=(image, own rendering))`, each a square of `16 * size * image_scale` pixels. The text is
    `match N`, with the similarity of colours in per cent. The first rendering is blank.

    ## Starting State
    `min_shapes` to `max_shapes` squares and circles in red, lime, blue and purple, in different cells, drawn uniformly.
    Reset options `min_shapes` and `max_shapes` override the arguments.

    ## Rewards
    The changes of two similarities above that of a blank page, a quarter each: `outline` (which pixels are drawn on)
    and `color`. Their sum over an episode is the similarity of the last image. `solved`: half.

    ## Trivial Policies
    A blank image, or one that is the same for every task, has success at most 0.02 and return at most 0.05.

    ## Episode End
    Terminated when the similarity of colours is at least 0.98.

    ## Information
    `success`, `action_is_valid`, `action_is_effective`, `reward_parts`, and `error` for an answer that is not accepted.

    ## Arguments
    - `size`: rows and columns of the grid.
    - `min_shapes`, `max_shapes`: smallest and largest number of shapes.
    - `image_scale`: factor of the images' height and width.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012
    option_names = ("min_shapes", "max_shapes")
    reward_range = (-0.5, 1.0)
    frequent_words = (
        "square", "circle", "red", "lime", "blue", "purple", "match", '<rect x="', '<circle cx="', '" y="',
        '.5" cy="', '" width="1" height="1" fill="', '.5" r="0.5" fill="', '"/>',
    )  # fmt: skip

    @checked_arguments
    def __init__(
        self,
        *,
        size: Size = 4,
        min_shapes: ShapeCount = 1,
        max_shapes: ShapeCount = 3,
        image_scale: Count = 1,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        optional_import("resvg_py", extra="svg")
        _check_counts(min_shapes, max_shapes, size=size)
        self.size, self.min_shapes, self.max_shapes = size, min_shapes, max_shapes
        self.side = size * _CELL * image_scale
        self.action_space = spaces.Text(_MAX_ACTION)
        image = spaces.Box(0, 255, (self.side, self.side, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {
                "text": spaces.Text(max_length=_TEXT_LENGTH, charset=TEXT_CHARSET),
                "images": spaces.Tuple((image, image)),
            }
        )
        self.instructions = self._rules(min_shapes, max_shapes)
        self._shapes: list[Shape] = []
        self._blank = render(Drawing(view_box=(0, 0, size, size)), side=self.side)
        self._show(Drawing(view_box=(0, 0, size, size)), self._blank, target=self._blank)

    def _rules(self, low: int, high: int) -> str:
        size = self.size
        return (
            f"You see two pictures of {size} by {size} cells: one to copy, and your own, which is blank at first. "
            f"The first one shows {low} to {high} shapes, each a square or a circle that fills a cell, "
            f"in {', '.join(COLORS[:-1])} or {COLORS[-1]}. Answer with SVG elements on a canvas of {size} by {size} "
            'units, such as <rect x="1" y="0" width="1" height="1" fill="red"/>'
            '<circle cx="2.5" cy="2.5" r="0.5" fill="lime"/>. Each answer draws your whole picture anew. The number '
            "after match says how similar the pictures are, from 0 to 100."
        )

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a new image."""
        chosen = self._begin(seed=seed, options=options)
        low = chosen.get("min_shapes", self.min_shapes)
        high = chosen.get("max_shapes", max(low, self.max_shapes))
        _check_counts(low, high, size=self.size)
        self.instructions = self._rules(low, high)
        self._shapes = self._draw(self.np_random, low, high)
        blank = Drawing(view_box=(0, 0, self.size, self.size))
        target = render(read_svg(_svg(self._shapes), size=self.size), side=self.side)
        self._show(blank, self._blank, target=target)
        return self._observe(), {}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Render an answer and compare it with the image."""
        text = self._take_text(action)
        before = (self._drawing, self._outline, self._color)
        error = ""
        try:
            drawing = read_svg(text, size=self.size)
            self._show(drawing, render(drawing, side=self.side), target=self._target)
        except SvgError as refusal:
            error = str(refusal)
        self._over = self._color >= _SOLVED
        parts = {
            "outline": _OUTLINE * (self._outline - before[1]),
            "color": _COLOR * (self._color - before[2]),
            "solved": _SOLVED_REWARD * self._over,
        }
        info: dict[str, Any] = {
            "success": self._over,
            "action_is_valid": not error,
            "action_is_effective": self._drawing != before[0],
            "reward_parts": parts,
        }
        if error:
            info["error"] = error
        return self._observe(), float(sum(parts.values())), self._over, False, info

    def state_key(self) -> str:
        """Return the shapes of the image and the agent's drawing."""
        own = f"{self._drawing.view_box} {self._drawing.body}" if self._drawing.body else "blank"
        return f"{_svg(self._shapes)} | {own}"

    def describe(self) -> str:
        """Return the shapes of the image row by row, each with its column and row."""
        return ", ".join(
            f"{shape.color} {shape.kind} {shape.column} {shape.row}" for shape in self._shapes
        )

    def difficulty(self) -> int:
        """Return the number of shapes."""
        return len(self._shapes)

    def optimal_action(self, rng: np.random.Generator) -> str:
        """Return the SVG of the image."""
        return _svg(self._shapes)

    def random_action(self, rng: np.random.Generator) -> str:
        """Return the SVG of any image that the environment could show."""
        return _svg(self._draw(rng, self.min_shapes, self.max_shapes))

    def render(self) -> RGBImage:
        """Return the image and the agent's rendering side by side (`render_mode="rgb_array"`)."""
        return np.concatenate([self._target, self._own], axis=1)

    def _draw(self, rng: np.random.Generator, low: int, high: int) -> list[Shape]:
        count = int(rng.integers(low, high + 1))
        cells = rng.choice(self.size**2, count, replace=False)
        return sorted(
            Shape(
                row=int(cell) // self.size,
                column=int(cell) % self.size,
                kind=KINDS[int(rng.integers(len(KINDS)))],
                color=COLORS[int(rng.integers(len(COLORS)))],
            )
            for cell in cells
        )

    def _show(self, drawing: Drawing, image: RGBImage, *, target: RGBImage) -> None:
        self._drawing, self._own, self._target = drawing, image, target
        self._outline, self._color = outline_match(image, target), color_match(image, target)

    def _observe(self) -> Observation:
        return {"text": f"match {int(100 * self._color)}", "images": (self._target, self._own)}


def _svg(shapes: list[Shape]) -> str:
    return "".join(shape.svg() for shape in shapes)


def _check_counts(low: int, high: int, *, size: int) -> None:
    # white stays the median colour: see color_match
    limit = min(8, (size**2 - 1) // 2)
    if not 1 <= low <= high <= limit:
        raise ValueError(
            f"min_shapes={low}, max_shapes={high}: expected 1 <= min_shapes <= max_shapes <= {limit} for size={size}"
        )
