"""Tasks of MiniGrid and BabyAI as an environment in words."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from ..adapters.optional import optional_import
from ..base import Environment, Observation, checked_arguments

ACTIONS = ("Left", "Right", "Forward", "Pickup", "Drop", "Toggle", "Done")
_DOES = {
    "Left": "Left turns you to the left.",
    "Right": "Right turns you to the right.",
    "Forward": "Forward takes you one cell ahead.",
    "Pickup": "Pickup takes the thing in the cell ahead.",
    "Drop": "Drop puts down what you carry in the cell ahead.",
    "Toggle": "Toggle opens the door or box in the cell ahead, or closes the door.",
    "Done": "Done says that the mission is completed.",
}
_TASK = "You are in a world of rooms made of cells, and have a mission. A wall or a thing blocks your way."
# codes of the library: 0 is unseen, 1 is empty
_EMPTY = 1
_DOORS = ("open", "closed", "locked")
_NOTHING = frozenset({"wall", "floor"})
_WAY = frozenset({"floor", "goal", "lava"})


class MiniGrid(Environment):
    """Complete a mission in a grid of rooms, seen from the agent in words.

    ## Description
    A task of the library MiniGrid, such as the levels of BabyAI (Chevalier-Boisvert et al., 2019).

    ## Action Space
    `Discrete`: `actions`, of Left, Right, Forward, Pickup, Drop, Toggle and Done.

    ## Observation Space
    `Text`: the mission, the things in view by their place from the agent, near ones first, and the free cells
    ahead of it, such as `go to the red ball: red ball 2 ahead 1 left, free 3`.
    What the agent carries is named at the end.

    ## Starting State
    As the library draws it.

    ## Rewards
    The library's: from 1 down to 0.1 for a completed mission, less for more steps; 0 otherwise.

    ## Episode End
    Terminated by success or failure of the mission, truncated at the library's limit of steps.

    ## Trivial Policies
    In the task of `env=babyai`, who goes Forward twice and turns Left again and again has success at most 0.35.

    ## Information
    `success`: the mission is completed. `action_is_effective`: the action changed the state or ended
    the mission.

    ## Arguments
    - `id`: gymnasium id, such as `BabyAI-GoToLocal-v0`.
    - `actions`: names of the actions that the task needs. `settings`: the task's own arguments.
    - `plans`: whether `plan()` tells where the mission's thing is, with which demonstrations then reason.
    """

    needs_trust = ("id", "settings")

    frequent_words = (
        "go to", "the", "a", "red", "green", "blue", "purple", "yellow", "grey", "ball", "box", "key", "ahead", "left",
        "right", "free", "carrying", "Left", "Right", "Forward", "Pickup", "Drop",
    )  # fmt: skip

    @checked_arguments
    def __init__(
        self,
        *,
        id: str = "BabyAI-GoToLocalS5N2-v0",
        actions: Sequence[str] = ACTIONS[:-1],
        settings: Mapping[str, Any] | None = None,
        plans: bool = False,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.plans = plans
        _library()
        unknown = [name for name in actions if name not in ACTIONS]
        if unknown or not actions or len(set(actions)) < len(actions):
            raise ValueError(
                f"actions: found {list(actions)}, expected some of {', '.join(ACTIONS)}, each once"
            )
        known = sorted(
            name for name in gymnasium.registry if name.startswith(("MiniGrid-", "BabyAI-"))
        )
        if id not in known:
            raise ValueError(f"id: found {id!r}, expected one of {', '.join(known)}")
        made = gymnasium.make(id, disable_env_checker=True, **dict(settings or {}))
        self.environment: Any = made.unwrapped
        self.action_names = tuple(actions)
        self.action_space = spaces.Discrete(len(self.action_names))
        self.observation_space = spaces.Text(10_000)
        self.instructions = " ".join(
            [_TASK, *(_DOES[name] for name in self.action_names), self._seen()]
        )
        codes = optional_import("minigrid.core.constants", extra="minigrid")
        self._kinds: Mapping[int, str] = codes.IDX_TO_OBJECT
        self._colors: Mapping[int, str] = codes.IDX_TO_COLOR
        self._view = np.zeros((1, 1, 3), np.uint8)
        self._bot: Any = None
        self._planned: int | None = None
        # of the present state; computing it takes a good part of a turn
        self._key = ""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw rooms and a mission."""
        self._begin(seed=seed, options=options)
        view, _ = self.environment.reset(seed=int(self.np_random.integers(2**31)))
        self._view = view["image"]
        self._bot = self._planned = None
        self._key = self._state_key()
        return self._observation(), {}

    def step(self, action: int | np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Carry out an action."""
        taken = ACTIONS.index(self.action_names[self._take(action)])
        before = self._key
        view, reward, terminated, truncated, _ = self.environment.step(taken)
        self._view = view["image"]
        self._over = terminated or truncated
        if self._bot is not None and not self._over:
            self._plan(taken)
        self._key = self._state_key()
        info = {
            "success": bool(terminated and reward > 0),
            "action_is_effective": bool(terminated) or self._key != before,
        }
        return self._observation(), float(reward), terminated, truncated, info

    def state_key(self) -> str:
        """Return the mission, the agent's place and load, and a digest of the grid."""
        return self._key

    def _state_key(self) -> str:
        environment = self.environment
        carried = (
            environment.carrying and f"{environment.carrying.color} {environment.carrying.type}"
        )
        digest = hashlib.sha256(environment.grid.encode().tobytes()).hexdigest()[:24]
        place = [int(number) for number in (*environment.agent_pos, environment.agent_dir)]
        return json.dumps([environment.mission, place, carried, digest])

    def describe(self) -> str:
        """Return the agent's view in words: `red ball 2 ahead 1 left, free 3`."""
        columns, rows = self._view.shape[:2]
        seen = []
        for column, row in np.argwhere(self._view[..., 0] > _EMPTY):
            ahead, right = rows - 1 - int(row), int(column) - columns // 2
            if ahead or right:
                seen.append((ahead, right, *(int(code) for code in self._view[column, row])))
        seen.sort(key=_distance)
        things = [
            f"{self._name(kind, color, state)}{_place(ahead, right)}"
            for ahead, right, kind, color, state in seen
            if self._kinds[kind] not in _NOTHING
        ]
        blocks = [
            ahead
            for ahead, right, kind, _, state in seen
            if not right and self._blocks(kind, state)
        ]
        free = min(blocks, default=rows) - 1
        carried = self.environment.carrying
        return ", ".join(
            [*things, f"free {free}"]
            + ([f"carrying {carried.color} {carried.type}"] if carried else [])
        )

    def plan(self) -> str | None:
        """Return where the mission's nearest thing in view is, `red ball 2 ahead 1 left`, or None without one."""
        columns, rows = self._view.shape[:2]
        seen = []
        for place in self._mission_places() if self.plans else ():
            relative = self.environment.relative_coords(*place)
            if relative is not None and self._view[relative][0] > _EMPTY:
                seen.append(
                    (rows - 1 - int(relative[1]), int(relative[0]) - columns // 2, relative)
                )
        if not seen:
            return None
        ahead, right, relative = min(seen, key=_distance)
        return self._name(*(int(code) for code in self._view[relative])) + _place(ahead, right)

    def difficulty(self) -> int:
        """Return the distance of the mission's nearest thing in cells, or 1 where the mission names no single thing."""
        places = self._mission_places()
        if not places:
            return 1
        row, column = self.environment.agent_pos
        return max(1, min(int(abs(row - place[0]) + abs(column - place[1])) for place in places))

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return the action of BabyAI's bot, which explores cells that it has not seen.

        Raises:
            NotImplementedError: The task is not one of BabyAI, or `actions` lacks what the bot does.
        """
        if not hasattr(self.environment, "instrs"):
            raise NotImplementedError(
                f"id={self.environment.spec.id}: only tasks of BabyAI have a bot"
            )
        if self._planned is None:
            self._plan(None)
        assert self._planned is not None
        name = ACTIONS[self._planned]
        if name not in self.action_names:
            raise NotImplementedError(f"actions: lacks {name}, which the bot needs here; add it")
        return self.action_names.index(name)

    def render(self) -> Any:
        """Return the current observation (`render_mode="ansi"`)."""
        return self._observation()

    def _observation(self) -> Observation:
        return f"{self.environment.mission}: {self.describe()}"

    def _mission_places(self) -> Sequence[tuple[int, int]]:
        """Return the cells of the things that the mission may mean; none where it names no single thing."""
        description = getattr(getattr(self.environment, "instrs", None), "desc", None)
        return getattr(description, "obj_poss", None) or ()

    def _seen(self) -> str:
        return (
            "Each turn tells the mission, the things that you see with their distance in cells ahead of you and to "
            "your left or right, and the number of free cells straight ahead."
        )

    def _name(self, kind: int, color: int, state: int) -> str:
        name = f"{self._colors[color]} {self._kinds[kind]}"
        return f"{_DOORS[state]} {name}" if self._kinds[kind] == "door" else name

    def _blocks(self, kind: int, state: int) -> bool:
        return self._kinds[kind] not in _WAY and not (self._kinds[kind] == "door" and state == 0)

    def _plan(self, taken: int | None) -> None:
        """Let the bot choose the next action after the one taken; a bot that has lost its way begins anew."""
        bot = optional_import("minigrid.utils.baby_ai_bot", extra="minigrid").BabyAIBot
        if self._bot is not None:
            try:
                self._planned = int(self._bot.replan(taken))
                return
            # its plan no longer fits the grid, as after a random action
            except Exception:
                self._bot = None
        self._bot = bot(self.environment)
        self._planned = int(self._bot.replan(None))


def _library() -> None:
    """Register the library's tasks, and keep its generator from printing."""
    optional_import("minigrid", extra="minigrid")
    level = optional_import("minigrid.envs.babyai.core.roomgrid_level", extra="minigrid")
    level.print = lambda *_, **__: None


def _distance(thing: Sequence[Any]) -> tuple[int, int, int]:
    """Return a key that orders things in view by distance, near ones and those straight ahead first."""
    ahead, right = thing[:2]
    return ahead + abs(right), abs(right), right


def _place(ahead: int, right: int) -> str:
    side = f" {abs(right)} {'right' if right > 0 else 'left'}" if right else ""
    return (f" {ahead} ahead" if ahead else "") + side
