"""Any gymnasium environment with discrete actions, shown as images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import gymnasium
import numpy as np
from annotated_types import Interval
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from PIL import Image

from ...envs.adapters.gym import Gym, made
from ...envs.adapters.pictures import on_white
from ...envs.base import TEXT_CHARSET, Observation, checked_arguments

Side = Annotated[int, Interval(ge=16, le=1024)]
_TEXT = "choose an action"


class GymVisual(Gym):
    """Play a gymnasium environment with discrete actions, shown as images.

    ## Description
    `Gym` whose state is visible only in the image, the environment's own image scaled to `height` by `width` pixels.

    ## Action Space
    As in `Gym`.

    ## Observation Space
    `Dict(text=Text, image=Box(0, 255, (height, width, 3), uint8))`; the text is always "choose an action".

    ## Starting State, Rewards, Episode End, Information
    As in `Gym`.

    ## Arguments
    Those of `Gym`, and `height` and `width` in pixels.
    """

    needs_trust = ("id", "settings")

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012

    @checked_arguments
    def __init__(
        self,
        *,
        id: str = "FrozenLake-v1",
        settings: Mapping[str, Any] | None = None,
        actions: Sequence[str] | None = None,
        success: str | None = None,
        rules: str | None = None,
        height: Side = 96,
        width: Side = 96,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(
            id=id,
            settings=settings,
            actions=actions,
            success=success,
            rules=rules,
            render_mode=render_mode,
        )
        self.height, self.width = height, width
        self.observation_space = spaces.Dict(
            text=spaces.Text(40, charset=TEXT_CHARSET),
            image=spaces.Box(0, 255, (height, width, 3), np.uint8),
        )

    def _rendering(self) -> str:
        return "Each turn shows a picture of the game."

    def render(self) -> Any:
        """Return the image (`render_mode="rgb_array"`)."""
        try:
            frame: Any = self.game.render()
        except DependencyNotInstalled as error:
            raise ImportError(
                f"{error}; pip install 'ragen_pl[gym]' installs pygame for gymnasium's own images"
            ) from error
        image = Image.fromarray(on_white(Image.fromarray(np.asarray(frame, dtype=np.uint8))))
        return np.asarray(image.resize((self.width, self.height), Image.Resampling.BOX))

    def _make(self, id: str, settings: dict[str, Any]) -> gymnasium.Env[Any, Any]:
        return made(id, settings | {"render_mode": "rgb_array"})

    def _observation(self) -> Observation:
        return {"text": _TEXT, "image": self.render()}
