"""Manipulation with a robot arm in images: tasks of the library Meta-World, controlled by named actions."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ...envs.adapters.optional import optional_import
from ...envs.base import TEXT_CHARSET, Count, Environment, Observation, checked_arguments

MOVES = {
    "Right": (1.0, 0.0, 0.0),
    "Left": (-1.0, 0.0, 0.0),
    "Forward": (0.0, 1.0, 0.0),
    "Back": (0.0, -1.0, 0.0),
    "Up": (0.0, 0.0, 1.0),
    "Down": (0.0, 0.0, -1.0),
}
_GRIPS = {"Open": -1.0, "Close": 1.0}
# control steps in which the fingers open or close
_GRIP_STEPS = 12
_TASKS = {
    "reach": "Move the hand to the red ball in the air.",
    "drawer-close": "Push the open drawer shut.",
}
_CAMERA = "corner2"
_TEXT_LENGTH = 60
_STILL = 1e-3
# metres between a thing and its goal
_NEAREST = 0.15
_NO_LIMIT = 10**9


class MetaWorld(Environment):
    """Solve a task with a robot arm that is seen in an image.

    ## Description
    A robot arm stands behind a table, and the camera looks at it from a corner in front. Right, left, forward and back
    are the robot's own. A move is held for `hold` control steps, which moves the hand by two to six centimetres.
    With EGL, many environments in several threads of a process may crash it: give each a process (`env.process=true`).

    ## Action Space
    `Discrete(8)`: Right, Left, Forward, Back, Up, Down, and Open and Close for the fingers.

    ## Observation Space
    `Dict(text=Text, image=Box(0, 255, (side, side, 3), uint8))`; the text is the task and the position of the hand in
    centimetres to the right, forward and up, such as `reach hand 0 60 19 open`.

    ## Starting State
    A task of `tasks`, and within the library's ranges the place of the drawer or of the goal, drawn uniformly.

    ## Rewards
    1 when the task is solved.

    ## Episode End
    Terminated when the task is solved at any control step.

    ## Information
    `success`, `action_is_effective`.

    ## Arguments
    - `tasks`: reach, drawer-close, or both. The scripted policy solves these with named moves.
    - `hold`: control steps of a move.
    - `side`: height and width of the image in pixels.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012
    action_names = (*MOVES, *_GRIPS)
    reward_range = (0.0, 1.0)
    frequent_words = ("hand", "target", *_TASKS, "open", "closed", *action_names)

    @checked_arguments
    def __init__(
        self,
        *,
        tasks: Sequence[str] = tuple(_TASKS),
        hold: Count = 5,
        side: Count = 128,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if not tasks or (unknown := [task for task in tasks if task not in _TASKS]):
            raise ValueError(
                f"tasks: found {unknown if tasks else 'none'}, expected some of {', '.join(_TASKS)}"
            )
        self.tasks, self.hold, self.side = tuple(tasks), hold, side
        self.action_space = spaces.Discrete(len(self.action_names))
        self.observation_space = spaces.Dict(
            {
                "text": spaces.Text(max_length=_TEXT_LENGTH, charset=TEXT_CHARSET | {"-"}),
                "image": spaces.Box(0, 255, (side, side, 3), np.uint8),
            }
        )
        self.instructions = (
            "You steer a robot arm, which you see in a picture from the corner in front of it. The first word of the "
            f"text is the task. {' '.join(f'{task}: {_TASKS[task]}' for task in self.tasks)} Right, Left, Forward and "
            "Back are seen from the robot, so the camera sees them turned. Each moves the hand by a few "
            "centimetres, as do Up and Down. Open and Close move the fingers. The numbers after hand are centimetres "
            "to the right, forward and up."
        )
        self._grip = -1.0
        # the renderer is chosen on the import of mujoco
        os.environ.setdefault("MUJOCO_GL", "egl")
        library = optional_import("metaworld", extra="metaworld")
        self.environments = {task: _environment(library, task, side=side) for task in self.tasks}
        self._policies = {task: _policy(task) for task in self.tasks}
        self._begin_task(self.tasks[0], np.random.default_rng(0))

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin a task."""
        self._begin(seed=seed, options=options)
        task = self.tasks[int(self.np_random.integers(len(self.tasks)))]
        self._begin_task(task, self.np_random)
        return self._observe(), {}

    def step(self, action: int | np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Hold a move for some control steps."""
        name, before, grip = self.action_names[self._take(action)], self.hand(), self._grip
        self._grip = _GRIPS.get(name, grip)
        control = np.array([*MOVES.get(name, (0.0, 0.0, 0.0)), self._grip], np.float32)
        success = False
        for _ in range(_GRIP_STEPS if name in _GRIPS else self.hold):
            self._state, _, _, _, info = self.environment.step(control)
            if info["success"]:
                success = True
                break
        self._over = success
        moved = bool(np.abs(self.hand() - before).max() > _STILL) or self._grip != grip
        info = {"success": success, "action_is_effective": moved}
        return self._observe(), float(success), success, False, info

    def state_key(self) -> str:
        """Return the task and the positions of all joints, the goal and the fingers."""
        numbers = [*self.environment.data.qpos, *self.environment._target_pos, self._grip]
        return f"{self._task} {' '.join(f'{number:.4f}' for number in numbers)}"

    def describe(self) -> str:
        """Return the positions of the hand and of the target in centimetres."""
        return (
            f"hand {_centimetres(self.hand())}, target {_centimetres(self.environment._target_pos)}"
        )

    def difficulty(self) -> int:
        """Return 1 to reach a place and 2 to close a drawer."""
        return list(_TASKS).index(self._task) + 1

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return the move nearest to that of the library's scripted policy."""
        with warnings.catch_warnings():
            # policies ask for more than the arm can do
            warnings.simplefilter("ignore")
            control = self._policies[self._task].get_action(self._state)
        grip = 1.0 if control[3] > 0 else -1.0
        if grip != self._grip:
            return self.action_names.index("Open" if grip < 0 else "Close")
        directions = np.array(list(MOVES.values()))
        return int(np.argmax(directions @ control[:3]))

    def render(self) -> NDArray[np.uint8]:
        """Return the image (`render_mode="rgb_array"`)."""
        renderer = self.environment.mujoco_renderer
        # gymnasium's renderer makes its context current only once, and draws into that of another environment
        viewer = renderer._get_viewer("rgb_array")
        viewer.make_context_current()
        image = np.flipud(renderer.render("rgb_array")).copy()
        _release_context()
        return image

    def close(self) -> None:
        """Free the renderers."""
        for environment in self.environments.values():
            if environment.mujoco_renderer.viewer is not None:
                environment.mujoco_renderer.viewer.make_context_current()
                environment.close()
                _release_context()

    def _begin_task(self, task: str, rng: np.random.Generator) -> None:
        self._task, self.environment, self._grip = task, self.environments[task], -1.0
        drawn = {
            "rand_vec": _draw_places(self.environment._random_reset_space, rng),
            "env_cls": type(self.environment),
            "partially_observable": False,
        }
        metaworld = optional_import("metaworld", extra="metaworld")
        self.environment.set_task(metaworld.Task(env_name=f"{task}-v3", data=pickle.dumps(drawn)))
        self._state, _ = self.environment.reset()

    def hand(self) -> NDArray[np.float64]:
        """Return the position of the hand in metres, `[3]`."""
        return np.array(self._state[:3])

    def _observe(self) -> Observation:
        fingers = "open" if self._grip < 0 else "closed"
        text = f"{self._task} hand {_centimetres(self.hand())} {fingers}"
        return {"text": text, "image": self.render()}


def _draw_places(space: spaces.Box, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw the places of a task: of a thing and of its goal, where there are both."""
    while True:
        places = rng.uniform(space.low, space.high)
        # nearer ones the library would draw again itself, but a given draw for ever
        if len(places) < 6 or np.linalg.norm(places[:2] - places[3:5]) >= _NEAREST:
            return places


def _centimetres(place: NDArray[np.float64]) -> str:
    return " ".join(str(round(100 * float(number))) for number in place)


def _environment(library: Any, task: str, *, side: int) -> Any:
    """Return the library's environment of a task."""
    classes = optional_import("metaworld.env_dict", extra="metaworld").ALL_V3_ENVIRONMENTS
    environment = classes[f"{task}-v3"](
        render_mode="rgb_array", camera_name=_CAMERA, width=side, height=side
    )
    # shadows take ten times as long as the rest
    environment.model.vis.quality.shadowsize = environment.model.vis.quality.offsamples = 0
    # the manager limits turns; the library would raise after 500 control steps
    environment.max_path_length = _NO_LIMIT
    return environment


def _policy(task: str) -> Any:
    policies = optional_import("metaworld.policies", extra="metaworld")
    name = "".join(word.capitalize() for word in task.split("-"))
    return getattr(policies, f"Sawyer{name}V3Policy")()


def _release_context() -> None:
    """Let another thread use the context; with other renderers than EGL do nothing."""
    if os.environ["MUJOCO_GL"] != "egl":
        return
    egl = optional_import("mujoco.egl", extra="metaworld")
    egl.EGL.eglMakeCurrent(
        egl.EGL_DISPLAY, egl.EGL.EGL_NO_SURFACE, egl.EGL.EGL_NO_SURFACE, egl.EGL.EGL_NO_CONTEXT
    )
