"""Sokoban with text observations. The rules are in `envs.sokoban_rules`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from gymnasium import spaces

from .base import (
    MAX_GRID,
    MOVES,
    TEXT_CHARSET,
    Count,
    CountOrZero,
    Environment,
    Observation,
    Reward,
    Symbols,
    TextStyle,
    check_number,
    checked_arguments,
)
from .sokoban_rules import Room, State, draw_start, fewest_pushes, move, shortest_way
from .sokoban_text import (
    SIGNS,
    coordinates_text,
    describe_state,
    grid_text,
    observation_rule,
    read_room,
    relative_positions,
    rules,
)

# More pushes than any room needs.
_MAX_PUSHES = 10_000
# a push takes three cells in a row
_SMALLEST = 5

Size = Annotated[int, Interval(ge=_SMALLEST, le=MAX_GRID)]


class Sokoban(Environment):
    """Push every box onto a target.

    ## Description
    A square room with outer walls and `walls` inner walls. Walking into a box pushes it if the cell
    behind it is free. Boxes cannot be pulled. Each reset draws a new solvable room by playing
    backwards from the solution.

    ## Action Space
    `Discrete(4)`: 0 Up, 1 Down, 2 Left, 3 Right.

    ## Observation Space
    `Text`. `render="coordinates"`: `me 1 2 box 2 3 target 4 4 walls 2 2, 3 1` (row, column; row
    0 at the top; only the walls inside the border). `render="grid"`: rows of # (wall), _ (floor),
    O (target), X (box), B (box on a target), P (player), S (player on a target).

    ## Starting State
    Random room, boxes and player. The shortest solution has `min_pushes` to `max_pushes` pushes.
    Reset options: `size` (a smaller room), `min_pushes`, `max_pushes`, or `layout` (rows of the symbols above).

    ## Rewards
    `solved_reward` when all boxes are on targets, `box_reward` for each box moved onto a target and
    `-box_reward` for each box moved off a target, minus `step_cost` for every move. RAGEN and VAGEN
    use `step_cost=0.1, box_reward=1, solved_reward=10`.

    ## Episode End
    Terminated when solved, and with `end_on_deadlock` when it can no longer be solved. The number of
    moves is not limited.

    ## Information
    `success`: solved. `action_is_effective`: the move changed the state.

    ## Arguments
    - `size`: rows and columns, border walls included, 5 to 16; of the largest room where resets name smaller ones.
    - `boxes`: at least 1. `walls`: number of walls inside the border.
    - `min_pushes`, `max_pushes`: bounds of the number of pushes in the shortest solution; None means
      no upper bound. The search stops after 4,000 states, which also bounds it.
    - `step_cost`, `box_reward`, `solved_reward`: at least 0.
    - `end_on_deadlock`: whether an unsolvable state ends the episode.
    - `render`: "coordinates" or "grid".
    - `plans`: whether `plan()` tells the next push of a shortest solution, with which demonstrations then reason.
    - `symbols`: "plain", or "other" for different words and symbols (`walker 1 2 crate 2 3 mark 4 4 stones 2 2`, and
      W . * C in the grid), to test whether a policy generalizes beyond the symbols.

    ## Trivial Policies
    Who walks in a circle has success at most 0.2 with the shipped settings, and who moves at random at most 0.3.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    action_names = MOVES
    option_names = ("size", "min_pushes", "max_pushes", "layout")
    relation_names = ("box", "target")

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
        render: TextStyle = TextStyle.COORDINATES,
        symbols: Symbols = Symbols.PLAIN,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.largest, self.boxes, self.walls = size, boxes, walls
        self.step_cost, self.box_reward, self.solved_reward = step_cost, box_reward, solved_reward
        self.end_on_deadlock, self.plans = end_on_deadlock, plans
        self.style, self.signs = render, SIGNS[symbols]
        self._resize(size)
        self.min_pushes, self.max_pushes = self._pushes(min_pushes, max_pushes)
        self.action_space = spaces.Discrete(4)
        self.observation_space = self._observation_space()
        self.room, self.state = Room(size, 0, 0), State(0, 1)
        self._pushes_of_state = (self.state, 0)
        # None without a solution
        self._solution: dict[State, int | None] = {}

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a room, or use `options["layout"]`."""
        options = self._begin(seed=seed, options=options)
        self._resize(options.get("size", self.largest))
        if "layout" in options:
            self.room, self.state = read_room(options["layout"], size=self.size)
            pushes = fewest_pushes(self.room, self.state)
        else:
            low = options.get("min_pushes", self.min_pushes)
            high = options.get("max_pushes", self.max_pushes)
            low, high = self._pushes(low, high)
            self.room, self.state, pushes = draw_start(
                self.np_random,
                size=self.size,
                boxes=self.boxes,
                walls=self.walls,
                min_pushes=low,
                max_pushes=high,
            )
        self._pushes_of_state = (self.state, pushes)
        self._solution = {}
        return self._observe(), {}

    def step(self, action: int | np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Move the player and push a box if there is one."""
        before = self.state
        self.state = after = move(self.room, before, action=self._take(action))
        targets = self.room.targets
        success = after.boxes == targets
        reward = -self.step_cost + self.solved_reward * success
        pushed = after.boxes != before.boxes
        if pushed:
            placed = (after.boxes & targets).bit_count() - (before.boxes & targets).bit_count()
            reward += self.box_reward * placed
        self._over = success or (pushed and self.end_on_deadlock and self.difficulty() < 0)
        info = {"success": success, "action_is_effective": after != before}
        return self._observe(), float(reward), self._over, False, info

    def state_key(self) -> str:
        """Return size, floor, targets, boxes and player as text."""
        room, state = self.room, self.state
        player = state.player.bit_length() - 1
        return f"{room.size} {room.floor:x} {room.targets:x} {state.boxes:x} {player}"

    def describe(self) -> str:
        """Return all cells and the adjacent walls: `me 1 2 box 2 3 target 4 4 walls Up`."""
        return describe_state(self.room, self.state)

    def plan(self) -> str | None:
        """Return the way to the next push, `reach 2 2 by Down Left push Right`; None without a solution."""
        way, state = self._way(), self.state
        steps: list[str] = []
        while self.plans and (action := way.get(state)) is not None:
            after = move(self.room, state, action=action)
            if after.boxes != state.boxes:
                row, column = divmod(state.player.bit_length() - 1, self.size)
                walk = f"reach {row} {column} by {' '.join(steps)} " if steps else ""
                return f"{walk}push {MOVES[action]}"
            steps.append(MOVES[action])
            state = after
        return None

    def relations(self) -> list[tuple[str, int, int]]:
        """Return the relative positions (name, rows down, columns right) of boxes and targets."""
        return relative_positions(self.room, self.state)

    def difficulty(self) -> int:
        """Return the number of pushes in the shortest solution of the current state, or -1 without one."""
        if self._pushes_of_state[0] != self.state:
            self._pushes_of_state = (self.state, fewest_pushes(self.room, self.state))
        return self._pushes_of_state[1]

    def potential(self) -> float:
        """Return minus the number of pushes to the solution, or minus the number of cells without one."""
        pushes = self.difficulty()
        return -float(pushes if pushes >= 0 else self.size**2)

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return the next move of a shortest solution, or a random move if there is none."""
        action = self._way().get(self.state)
        return int(rng.integers(4)) if action is None else action

    def render(self) -> str:
        """Return the grid as text (`render_mode="ansi"`)."""
        return grid_text(self.room, self.state)

    def _way(self) -> dict[State, int | None]:
        """Return the next move of a shortest solution by state, from the present state on; None without a solution."""
        if self.state not in self._solution:
            # a state without a solution is not searched again
            self._solution[self.state] = None
            self._solution |= dict(shortest_way(self.room, self.state))
        return self._solution

    def _observe(self) -> Observation:
        if self.style is TextStyle.GRID:
            return grid_text(self.room, self.state, signs=self.signs)
        return coordinates_text(self.room, self.state, signs=self.signs)

    def _resize(self, size: int) -> None:
        check_number(size, name="size", low=_SMALLEST, high=self.largest, whole=True)
        cells = (size - 2) ** 2
        check_number(self.boxes, name="boxes", low=1, high=cells // 2, whole=True)
        check_number(self.walls, name="walls", low=0, high=cells - 2 * self.boxes - 1, whole=True)
        self.size = size
        self.instructions = rules(size, boxes=self.boxes, seen=self._observation_rule())

    def _pushes(self, low: int, high: int | None) -> tuple[int, int]:
        high = _MAX_PUSHES if high is None else high
        check_number(low, name="min_pushes", low=1, high=_MAX_PUSHES, whole=True)
        check_number(high, name="max_pushes", low=low, high=_MAX_PUSHES, whole=True)
        return low, high

    def _observation_rule(self) -> str:
        return observation_rule(self.style, signs=self.signs)

    def _observation_space(self) -> spaces.Space[Any]:
        return spaces.Text(max_length=80 + 8 * self.size**2, charset=TEXT_CHARSET)
