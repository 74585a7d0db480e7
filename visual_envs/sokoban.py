"""Sokoban with image observations. The rules are those of `envs.sokoban`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..envs.base import Count, CountOrZero, Reward, checked_arguments
from ..envs.sokoban import Size, Sokoban
from ..envs.sokoban_text import tile_codes
from .sokoban_tiles import sokoban_tiles
from .tile_images import TileImages
from .tiles import Theme

_SEEN = {
    Theme.DAY: (
        "Each turn shows a picture of the room from above: you are the figure in blue, walls are "
        "bricks, targets are red rings, boxes are brown crates and turn green on a target."
    ),
    Theme.NIGHT: (
        "Each turn shows a picture of the room from above, by night: you are the figure in white, walls are "
        "gray bricks, targets are yellow rings, boxes are blue crates and turn pink on a target."
    ),
}


class SokobanVisual(TileImages, Sokoban):
    """Push every box onto a target, shown as an image from above.

    ## Description
    `Sokoban` whose state is visible only in the image, a square of `16 * size * image_scale` pixels.

    ## Action Space
    `Discrete(4)`: 0 Up, 1 Down, 2 Left, 3 Right.

    ## Observation Space
    `Dict(text=Text, image=Box(0, 255, (side, side, 3), uint8))`; the text is always
    "push the boxes onto the targets".

    ## Starting State
    As in `Sokoban`, reset options included.

    ## Rewards
    As in `Sokoban`.

    ## Episode End
    As in `Sokoban`: terminated when solved.

    ## Information
    `success`, `action_is_effective`.

    ## Arguments
    Those of `Sokoban` except `render` and `symbols` (a smaller room is in the upper left corner of the image), and
    - `tiles`: "day", or "night" for the same shapes in different colors.
    - `image_scale`: factor of the image's height and width. Pretrained models read an image in patches of
      14 to 32 pixels, and a tile is 16 pixels wide.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    task_text = "push the boxes onto the targets"

    @checked_arguments
    def __init__(
        self,
        *,
        size: Size = 6,
        boxes: Count = 1,
        walls: CountOrZero = 2,
        min_pushes: Count = 1,
        max_pushes: Count | None = None,
        step_cost: Reward = 0.0,
        box_reward: Reward = 0.0,
        solved_reward: Reward = 1.0,
        end_on_deadlock: bool = False,
        plans: bool = False,
        tiles: Theme = Theme.DAY,
        image_scale: Count = 1,
        render_mode: str | None = None,
    ) -> None:
        self.theme, self.image_scale = tiles, image_scale
        super().__init__(
            size=size,
            boxes=boxes,
            walls=walls,
            min_pushes=min_pushes,
            max_pushes=max_pushes,
            step_cost=step_cost,
            box_reward=box_reward,
            solved_reward=solved_reward,
            end_on_deadlock=end_on_deadlock,
            plans=plans,
            render_mode=render_mode,
        )

    def _tiles(self) -> NDArray[np.int64]:
        return sokoban_tiles(self.theme)

    def _tile_codes(self) -> NDArray[np.intp]:
        return np.array(tile_codes(self.room, self.state), dtype=np.intp)

    def _observation_rule(self) -> str:
        return _SEEN[self.theme]
