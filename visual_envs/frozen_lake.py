"""FrozenLake with image observations. Rules and maps are those of `envs.frozen_lake`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..envs.base import Count, Probability, Reward, bits, checked_arguments
from ..envs.frozen_lake import FrozenLake, HoleFraction, Size
from .frozen_lake_tiles import (
    WITH_PLAYER,
    FrozenLakeTile,
    frozen_lake_tiles,
)
from .tile_images import TileImages
from .tiles import Theme

_SEEN = {
    Theme.DAY: (
        "Each turn shows a picture of the lake from above: you are the figure in red, holes are dark "
        "water, the goal is a green flag on a yellow field."
    ),
    Theme.NIGHT: (
        "Each turn shows a picture of the lake from above, by night: you are the figure in white, holes "
        "are black water, the goal is a blue flag on an orange field."
    ),
}
_SEEN_TRAIL = " Footprints mark the cells where you have been."


class FrozenLakeVisual(TileImages, FrozenLake):
    """Walk over a frozen lake, shown as an image from above.

    ## Description
    `FrozenLake` whose state is visible only in the image, a square of `16 * size * image_scale` pixels. A smaller lake
    is in its upper left corner.

    ## Action Space
    `Discrete(4)`: 0 Up, 1 Down, 2 Left, 3 Right.

    ## Observation Space
    `Dict(text=Text, image=Box(0, 255, (side, side, 3), uint8))`; the text is always
    "reach the goal".

    ## Starting State
    As in `FrozenLake`, reset options included.

    ## Rewards
    As in `FrozenLake`: 1 at the goal, minus `step_cost` for every move.

    ## Episode End
    Terminated at the goal or in a hole.

    ## Information
    `success`, `action_is_effective`.

    ## Arguments
    Those of `FrozenLake` except `render` and `symbols`, and
    - `trail`: whether visited cells show footprints. They let a policy that sees one image at a time
      detect that it walks in circles.
    - `tiles`: "day", or "night" for the same shapes in different colors.
    - `image_scale`: factor of the image's height and width. Pretrained models read an image in patches of
      14 to 32 pixels, and a tile is 16 pixels wide.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    task_text = "reach the goal"

    @checked_arguments
    def __init__(
        self,
        *,
        size: Size = 4,
        hole_fraction: HoleFraction = 0.2,
        slip_probability: Probability = 0.0,
        min_distance: Count = 2,
        max_distance: Count | None = None,
        step_cost: Reward = 0.0,
        random_start: bool = True,
        plans: bool = False,
        trail: bool = False,
        tiles: Theme = Theme.DAY,
        image_scale: Count = 1,
        render_mode: str | None = None,
    ) -> None:
        self.trail, self.theme, self.image_scale = trail, tiles, image_scale
        super().__init__(
            size=size,
            hole_fraction=hole_fraction,
            slip_probability=slip_probability,
            min_distance=min_distance,
            max_distance=max_distance,
            step_cost=step_cost,
            random_start=random_start,
            plans=plans,
            render_mode=render_mode,
        )
        self._arrive()

    def _arrive(self) -> None:
        self._codes = np.zeros(self.size * self.size, dtype=np.intp)
        self._codes[bits(self.lake.holes)] = FrozenLakeTile.HOLE
        self._codes[self.lake.goal] = FrozenLakeTile.GOAL

    def _moved(self, before: int) -> None:
        if self.trail:
            self._codes[before] = FrozenLakeTile.TRAIL

    def _tiles(self) -> NDArray[np.int64]:
        return frozen_lake_tiles(self.theme)

    def _tile_codes(self) -> NDArray[np.intp]:
        codes = self._codes.copy()
        codes[self.cell] += WITH_PLAYER
        return codes

    def _observation_rule(self) -> str:
        return _SEEN[self.theme] + _SEEN_TRAIL * self.trail
