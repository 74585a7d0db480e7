"""Tasks of MiniGrid and BabyAI as an environment with images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from gymnasium import spaces

from ...envs.adapters.minigrid import ACTIONS, MiniGrid
from ...envs.base import TEXT_CHARSET, Observation, checked_arguments


class View(StrEnum):
    """Image of the grid: as the agent sees it, or from above as a whole."""

    AGENT = "agent"
    MAP = "map"


_SEEN = {
    View.AGENT: (
        "Each turn tells the mission and shows a picture of the cells before you: you are the red triangle in the "
        "middle of the bottom row and look up."
    ),
    View.MAP: (
        "Each turn tells the mission and shows a picture of the whole world from above: you are the red triangle, and "
        "its tip points ahead."
    ),
}


class MiniGridVisual(MiniGrid):
    """Complete a mission in a grid of rooms, shown as an image.

    ## Description
    `MiniGrid` whose state is visible only in the image.

    ## Action Space
    As in `MiniGrid`.

    ## Observation Space
    `Dict(text=Text, image=Box(0, 255, (height, width, 3), uint8))`; the text is the mission.

    ## Starting State
    As in `MiniGrid`.

    ## Rewards
    As in `MiniGrid`.

    ## Episode End
    As in `MiniGrid`.

    ## Information
    `success`, `action_is_effective`.

    ## Arguments
    Those of `MiniGrid`, and
    - `view`: "agent" for its field of view, "map" for the whole grid.
    - `tile`: pixels along a cell's side.
    """

    needs_trust = ("id", "settings")

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012

    @checked_arguments
    def __init__(
        self,
        *,
        id: str = "BabyAI-GoToLocalS5N2-v0",
        actions: Sequence[str] = ACTIONS[:-1],
        settings: Mapping[str, Any] | None = None,
        view: View = View.AGENT,
        tile: Annotated[int, Interval(ge=4, le=64)] = 16,
        plans: bool = False,
        render_mode: str | None = None,
    ) -> None:
        self.view, self.tile = View(view), tile
        super().__init__(
            id=id, actions=actions, settings=settings, plans=plans, render_mode=render_mode
        )
        environment = self.environment
        sides = (
            (environment.agent_view_size,) * 2
            if self.view is View.AGENT
            else (environment.height, environment.width)
        )
        shape = (*(side * tile for side in sides), 3)
        self.observation_space = spaces.Dict(
            text=spaces.Text(1000, charset=TEXT_CHARSET), image=spaces.Box(0, 255, shape, np.uint8)
        )

    def render(self) -> Any:
        """Return the image (`render_mode="rgb_array"`)."""
        agent = self.view is View.AGENT
        return self.environment.get_frame(highlight=agent, tile_size=self.tile, agent_pov=agent)

    def _observation(self) -> Observation:
        return {"text": self.environment.mission, "image": self.render()}

    def _seen(self) -> str:
        return _SEEN[self.view]
