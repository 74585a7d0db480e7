"""Navigation in first-person images: rooms of the library MiniWorld."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ...envs.adapters.optional import optional_import
from ...envs.base import TEXT_CHARSET, Count, Environment, Observation, checked_arguments

_TEXT = "go to the red box"
_TURN = 15
# steps of the library's own limit, which the trainer replaces
_NO_LIMIT = 1_000_000
_REMEDY = "set env.process=true"


# environments of this process whose window is open
_open: weakref.WeakSet[gymnasium.Env[Any, Any]] = weakref.WeakSet()


class Room(StrEnum):
    """A room, or hall, of the library."""

    HALLWAY = "hallway"
    ONE_ROOM = "one_room"


class MiniWorld(Environment):
    """Walk to the red box, seen through the walker's eyes.

    ## Description
    A walker stands in a room or hall with a red box. An image shows what is in front, 60 degrees wide. The library
    draws into the window that was opened last, and in its thread only: an environment needs a process of its own
    (`env.process=true`).

    ## Action Space
    `Discrete(3)`: 0 Left and 1 Right turn by `15 * turn` degrees, 2 Forward walks `0.15 * walk` metres.

    ## Observation Space
    `Dict(text=Text, image=Box(0, 255, (height, width, 3), uint8))`; the text is always "go to the red box".

    ## Starting State
    Places of box and walker and the walker's heading are drawn uniformly; in `hallway` the box is at the end.

    ## Rewards
    1 when the walker is next to the box.

    ## Episode End
    Terminated next to the box.

    ## Information
    `success`, `action_is_effective`.

    ## Arguments
    - `room`: "hallway" or "one_room".
    - `size`: length of the hallway, or of both sides of the room, in metres.
    - `turn`, `walk`: library's steps in a move.
    - `width`, `height`: size of the image in pixels.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012
    action_names = ("Left", "Right", "Forward")
    reward_range = (0.0, 1.0)
    frequent_words = ("box", "left", "right", "ahead", *action_names, "red")

    @checked_arguments
    def __init__(
        self,
        *,
        room: Room = Room.ONE_ROOM,
        size: Count = 6,
        turn: Count = 2,
        walk: Count = 6,
        width: Count = 96,
        height: Count = 64,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.turn, self.walk = turn, walk
        self.action_space = spaces.Discrete(len(self.action_names))
        self.observation_space = spaces.Dict(
            {
                "text": spaces.Text(max_length=len(_TEXT), charset=TEXT_CHARSET),
                "image": spaces.Box(0, 255, (height, width, 3), np.uint8),
            }
        )
        self.instructions = (
            "You walk through a room with a red box, and the picture shows what is in front of you. Go next to the "
            f"box. Left and Right turn you by {_TURN * turn} degrees. Forward walks {0.15 * walk:g} metres, or up to "
            "a wall. If you do not see the box, turn until you do."
        )
        if _open:
            raise RuntimeError(f"a second MiniWorld in a process cannot draw; {_REMEDY}")
        self.environment = _environment(room, size=size, width=width, height=height)
        _open.add(self)
        self._thread = threading.get_ident()
        self._image = np.zeros((height, width, 3), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Place walker and box."""
        self._begin(seed=seed, options=options)
        self._check_thread()
        self._image, _ = self.environment.reset(seed=int(self.np_random.integers(2**31)))
        # a walker who begins next to the box has nothing to do
        while self.environment.near(self.environment.box):
            self._image, _ = self.environment.reset()
        return self._observe(), {}

    def step(self, action: int | np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Turn or walk."""
        name, before = self.action_names[self._take(action)], self.state_key()
        self._check_thread()
        moves = self.environment.actions
        number = {"Left": moves.turn_left, "Right": moves.turn_right, "Forward": moves.move_forward}
        for _ in range(self.walk if name == "Forward" else self.turn):
            self._image, _, self._over, _, _ = self.environment.step(number[name])
            if self._over:
                break
        info = {"success": self._over, "action_is_effective": self.state_key() != before}
        return self._observe(), float(self._over), self._over, False, info

    def state_key(self) -> str:
        """Return the places of walker and box and the heading in whole degrees."""
        walker, box = self.environment.agent, self.environment.box
        places = (walker.pos[0], walker.pos[2], box.pos[0], box.pos[2])
        heading = round(math.degrees(walker.dir)) % 360
        return " ".join([*(f"{place:.3f}" for place in places), str(heading)])

    def describe(self) -> str:
        """Return where the box is from the walker: its distance in metres and on which side."""
        angle, distance = self._to_box()
        aim = self._aim()
        side = "ahead" if abs(angle) <= aim else "left" if angle > 0 else "right"
        return f"box {side} {round(distance)}"

    def difficulty(self) -> int:
        """Return the number of moves that the scripted policy needs without obstacles."""
        angle, distance = self._to_box()
        turns = round(abs(angle) / math.radians(_TURN * self.turn))
        return 1 + turns + int(distance / (0.15 * self.walk))

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return a turn towards the box, or a step if it is ahead."""
        angle, _ = self._to_box()
        if abs(angle) <= self._aim():
            return self.action_names.index("Forward")
        return self.action_names.index("Left" if angle > 0 else "Right")

    def render(self) -> NDArray[np.uint8]:
        """Return the image (`render_mode="rgb_array"`)."""
        return self._image

    def close(self) -> None:
        """Free the window."""
        _open.discard(self)
        self.environment.close()

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError(f"MiniWorld cannot draw in a second thread; {_REMEDY}")

    def _observe(self) -> Observation:
        return {"text": _TEXT, "image": self._image}

    def _aim(self) -> float:
        """Return the largest angle in radians that no turn makes smaller."""
        return 0.5 * math.radians(_TURN * self.turn) + 1e-6

    def _to_box(self) -> tuple[float, float]:
        """Return the angle to the left in radians, from -pi to pi, and the distance in metres."""
        walker, box = self.environment.agent, self.environment.box
        ahead, aside = box.pos[0] - walker.pos[0], walker.pos[2] - box.pos[2]
        angle = math.atan2(aside, ahead) - walker.dir
        return (angle + math.pi) % (2 * math.pi) - math.pi, math.hypot(ahead, aside)


def _environment(room: Room, *, size: int, width: int, height: int) -> Any:
    """Return the library's environment."""
    # the library opens its window on import
    optional_import("pyglet", extra="miniworld").options["headless"] = True
    settings = {"obs_width": width, "obs_height": height}
    if room is Room.HALLWAY:
        environment = optional_import("miniworld.envs.hallway", extra="miniworld").Hallway(
            length=size, **settings
        )
    else:
        environment = optional_import("miniworld.envs.oneroom", extra="miniworld").OneRoom(
            size=size, **settings
        )
    environment.max_episode_steps = _NO_LIMIT
    return environment
