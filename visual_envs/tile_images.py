"""Mix-in for environments on a square grid that show it as an image of tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ..envs.base import TEXT_CHARSET, Environment, Observation
from .tiles import TILE, Theme, lay_out


class TileImages(Environment):
    """Shows the state of a grid as an image with a constant text.

    It stands before the class with the rules among the bases. A subclass sets `theme` and `image_scale` before that
    class's constructor runs.

    Attributes:
        task_text: Text of each observation.
        theme: Colors of the tiles.
        image_scale: Factor of the image's height and width.
        size: Rows and columns of the present grid.
        largest: Rows and columns of the largest grid, which the image has room for.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012
    task_text: str
    theme: Theme
    image_scale: int
    size: int
    largest: int

    def render(self) -> Any:
        """Return the image, uint8 `[side, side, 3]` (`render_mode="rgb_array"`)."""
        codes = self._tile_codes()
        return lay_out(
            self._tiles(), codes, size=self.size, largest=self.largest, scale=self.image_scale
        )

    def _tiles(self) -> NDArray[np.int64]:
        """Return all tiles in the colors of the theme, packed for `lay_out`."""
        raise NotImplementedError

    def _tile_codes(self) -> NDArray[np.intp]:
        """Return the index of each cell's tile, row by row, `[size * size]`."""
        raise NotImplementedError

    def _observe(self) -> Observation:
        return {"text": self.task_text, "image": self.render()}

    def _observation_space(self) -> spaces.Space[Any]:
        side = self.largest * TILE * self.image_scale
        image = spaces.Box(0, 255, (side, side, 3), np.uint8)
        text = spaces.Text(max_length=len(self.task_text), charset=TEXT_CHARSET)
        return spaces.Dict({"text": text, "image": image})
