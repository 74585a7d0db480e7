"""Members of an environment on a server of `ragen_pl.serve_environment`, as its messages give them."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from PIL import Image

from .pictures import on_white

_TEXT_LENGTH = 4000


class Members:
    """Members that do not depend on the state, and those of the present state.

    Args:
        constant: The former, as `/metadata` and each reset give them.
    """

    def __init__(self, constant: Mapping[str, Any]) -> None:
        self.instructions = str(constant.get("instructions") or "")
        self.rules = str(constant.get("rules") or self.instructions)
        self.tool_schemas: tuple[Any, ...] = tuple(constant.get("tool_schemas") or ())
        self.action_names: tuple[str, ...] = tuple(constant.get("action_names") or ())
        self.relation_names: tuple[str, ...] = tuple(constant.get("relation_names") or ())
        self.has_relations = bool(constant.get("has_relations"))
        self.has_forfeit = bool(constant.get("has_forfeit"))
        self.draws_held_out = bool(constant.get("draws_held_out"))
        self.format_penalty: float | None = constant.get("format_penalty")
        limits = constant.get("reward_range")
        self.reward_range: tuple[float, float] | None = (
            None if limits is None else (limits[0], limits[1])
        )
        self.action_space: spaces.Space[Any] = (
            spaces.Discrete(len(self.action_names))
            if self.action_names
            else spaces.Text(int(constant.get("max_action_length") or _TEXT_LENGTH))
        )
        self._state: Mapping[str, Any] = {}

    def update(self, state: Mapping[str, Any]) -> None:
        """Take over the members of a new state."""
        self._state = state

    def relations(self) -> list[tuple[str, int, int]]:
        """Return the positions of things relative to the player."""
        return [(name, down, right) for name, down, right in self.state("relations")]

    def state(self, name: str) -> Any:
        """Return a member of the present state.

        Raises:
            NotImplementedError: The environment has none.
        """
        value = self._state.get(name)
        if value is None:
            raise NotImplementedError(f"the environment on the server has no {name}")
        return value


def image_of(url: str) -> np.ndarray:
    """Return an image, uint8 `[height, width, 3]`, from the URL of a PNG file that holds it.

    Raises:
        ValueError: It is none.
    """
    head, found, data = url.partition(";base64,")
    if not found or head != "data:image/png":
        raise ValueError(f"found {url[:40]!r}, expected data:image/png;base64,…")
    with Image.open(io.BytesIO(base64.b64decode(data)), formats=["PNG"]) as image:
        return on_white(image)
