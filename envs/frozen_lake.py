"""FrozenLake with text observations. Maps are drawn in `envs.frozen_lake_map`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from gymnasium import spaces
from numpy.typing import NDArray

from .base import (
    MAX_GRID,
    MOVES,
    TEXT_CHARSET,
    Count,
    Environment,
    Observation,
    Probability,
    Reward,
    Symbols,
    bits,
    cells_text,
    check_number,
    checked_arguments,
)
from .frozen_lake_map import (
    FrozenLakeMap,
    action_values,
    draw_map,
    neighbors,
    outcomes,
    read_map,
    walk_distance,
)
from .frozen_lake_text import (
    SIGNS,
    FrozenLakeStyle,
    describe_state,
    directions_text,
    grid_text,
    observation_rule,
    relative_positions,
    rules,
)

Size = Annotated[int, Interval(ge=2, le=MAX_GRID)]
HoleFraction = Annotated[float, Interval(ge=0, le=0.8)]


class FrozenLake(Environment):
    """Walk over a square frozen lake to the goal.

    ## Description
    Every cell except start and goal is a hole with probability `hole_fraction`. Each reset draws a new
    map with a path to the goal. A move against the edge has no effect.

    ## Action Space
    `Discrete(4)`: 0 Up, 1 Down, 2 Left, 3 Right.

    ## Observation Space
    `Text`. `render="coordinates"`: `me 1 2 goal 3 0 holes 0 1, 2 2` (row, column; row 0 at the
    top). `render="grid"`: rows of P (player), _ (ice), O (hole), G (goal), X (player in a hole),
    W (player at the goal). `render="directions"`: `goal Down Left holes Right, Up Left`, the holes around the player.

    ## Starting State
    Start and goal are random. The shortest path around the holes has `min_distance` to
    `max_distance` moves. With `random_start=False` they are opposite corners.
    Reset options: `size` (a smaller lake), `min_distance`, `max_distance`, `min_detour` (number of moves that the
    holes add to the shortest path), or `layout` (rows in gymnasium's letters SFHG).

    ## Rewards
    1 at the goal, 0 otherwise, minus `step_cost` for every move.

    ## Episode End
    Terminated at the goal or in a hole. The number of moves is not limited.

    ## Information
    `success`: the player is at the goal. `action_is_effective`: the move changed the player's cell.

    ## Arguments
    - `size`: rows and columns, 2 to 16; of the largest lake where resets name smaller ones.
    - `hole_fraction`: from 0 to 0.8.
    - `slip_probability`: p. A move goes in the intended direction with probability 1 - p and to
      either side with p / 2. 2/3 equals gymnasium's `is_slippery=True`.
    - `min_distance`, `max_distance`: bounds of the shortest path from start to goal, in moves; None
      means no upper bound.
    - `step_cost`: at least 0.
    - `random_start`: whether start and goal are random.
    - `render`: "coordinates", "grid" or "directions".
    - `plans`: whether `plan()` tells the moves of a shortest path, with which demonstrations then reason.
    - `symbols`: "plain", or "other" for different words and symbols (`walker 1 2 flag 3 0 pits 0 1`,
      and A . # F in the grid), to test whether a policy generalizes beyond the symbols.

    ## Trivial Policies
    Who walks Right and Down in turn has success at most 0.3 with the shipped settings.

    ## Version History
    - v0: first version.
    """

    needs_trust = ()

    action_names = MOVES
    option_names = ("size", "min_distance", "max_distance", "min_detour", "layout")
    relation_names = ("goal", "hole")

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
        render: FrozenLakeStyle = FrozenLakeStyle.COORDINATES,
        symbols: Symbols = Symbols.PLAIN,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.largest = size
        self.hole_fraction, self.slip_probability = hole_fraction, slip_probability
        self.step_cost, self.random_start, self.plans = step_cost, random_start, plans
        self.style, self.signs = render, SIGNS[symbols]
        self.min_distance, self.max_distance = min_distance, max_distance
        self._resize(size)
        self._distances({})
        self.action_space = spaces.Discrete(4)
        self.observation_space = self._observation_space()
        self.lake = FrozenLakeMap(size, 0, size * size - 1, 0, 2 * size - 2)
        self.cell = 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Draw a map, or use `options["layout"]`, and place the player at the start."""
        options = self._begin(seed=seed, options=options)
        self._resize(options.get("size", self.largest))
        if "layout" in options:
            self.lake = read_map(options["layout"], size=self.size)
        else:
            detour = options.get("min_detour", 0)
            check_number(detour, name="min_detour", low=0, high=self.size**2, whole=True)
            low, high = self._distances(options)
            self.lake = draw_map(
                self.np_random,
                size=self.size,
                hole_fraction=self.hole_fraction,
                min_distance=low,
                max_distance=high,
                random_start=self.random_start,
                min_detour=detour,
            )
        self.cell = self.lake.start
        self.__dict__.pop("_values", None)
        self._arrive()
        return self._observe(), {}

    def step(self, action: int | np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Move in the given direction, or slip to a side."""
        direction = self._take(action)
        if self.slip_probability:
            draw = self.np_random.random() - (1.0 - self.slip_probability)
            if draw >= 0.0:
                sides = (2, 3) if direction < 2 else (0, 1)
                direction = sides[draw >= self.slip_probability / 2]
        before, self.cell = self.cell, neighbors(self.size)[self.cell][direction]
        success = self.cell == self.lake.goal
        self._over = success or bool(self.lake.holes >> self.cell & 1)
        self._moved(before)
        info = {"success": success, "action_is_effective": self.cell != before}
        return self._observe(), float(success) - self.step_cost, self._over, False, info

    def transitions(self, state: int, action: int) -> list[tuple[float, int, float, bool]]:
        """Return (probability, next cell, reward, terminated) of an action in a cell.

        Goal and holes are absorbing with reward 0. A cell that two outcomes reach is listed twice.
        """
        if self._final(state):
            return [(1.0, state, 0.0, True)]
        transitions = []
        for probability, way in outcomes(action, slip_probability=self.slip_probability):
            cell = neighbors(self.size)[state][way]
            reward = float(cell == self.lake.goal) - self.step_cost
            transitions.append((probability, cell, reward, self._final(cell)))
        return transitions

    def state_key(self) -> str:
        """Return size, cell, goal and holes as text."""
        return f"{self.size} {self.cell} {self.lake.goal} {self.lake.holes:x}"

    def describe(self) -> str:
        """Return the player's cell, the goal and the moves into a hole: `me 1 2 goal 3 0 avoid Up Left`."""
        return describe_state(self.lake, cell=self.cell)

    def plan(self) -> str | None:
        """Return the moves of a shortest path to the goal, as without slips: `Down Down Left`."""
        lake, cell = self.lake, self.cell
        moves: list[str] = []
        while self.plans and not self._final(cell):
            distances = [
                -1
                if lake.holes >> after & 1
                else walk_distance(self.size, start=after, goal=lake.goal, holes=lake.holes)
                for after in neighbors(self.size)[cell]
            ]
            open_moves = [move for move, distance in enumerate(distances) if distance >= 0]
            if not open_moves:
                return None
            move = min(open_moves, key=distances.__getitem__)
            moves.append(MOVES[move])
            cell = neighbors(self.size)[cell][move]
        return " ".join(moves) or None

    def relations(self) -> list[tuple[str, int, int]]:
        """Return the relative positions (name, rows down, columns right) of the goal and of adjacent holes."""
        return relative_positions(self.lake, cell=self.cell)

    def difficulty(self) -> int:
        """Return the length of the shortest path to the goal without slips, or -1 in a hole."""
        if self.cell == self.lake.start:
            return self.lake.distance
        if self.lake.holes >> self.cell & 1:
            return -1
        lake = self.lake
        return walk_distance(self.size, start=self.cell, goal=lake.goal, holes=lake.holes)

    def potential(self) -> float:
        """Return minus the length of the shortest path to the goal, or minus the number of cells without a path."""
        distance = self.difficulty()
        return -float(distance if distance >= 0 else self.size**2)

    def optimal_action(self, rng: np.random.Generator) -> int:
        """Return an action with the highest probability of reaching the goal, discounted by 0.99 a move."""
        values = self._values[self.cell]
        return int(rng.choice(np.flatnonzero(values >= values.max() - 1e-7)))

    def blind_action(self, rng: np.random.Generator) -> int:
        """Return a move towards the goal that ignores holes."""
        size, goal = self.size, self.lake.goal
        down, right = goal // size - self.cell // size, goal % size - self.cell % size
        good = [int(down > 0)] * (down != 0) + [2 + int(right > 0)] * (right != 0)
        return int(good[rng.integers(len(good))]) if good else int(rng.integers(4))

    def render(self) -> str:
        """Return the grid as text (`render_mode="ansi"`)."""
        return grid_text(self.lake, cell=self.cell, grid=self.signs.grid)

    @cached_property
    def _values(self) -> NDArray[np.float64]:
        return action_values(self.lake, slip_probability=self.slip_probability)

    def _final(self, cell: int) -> bool:
        return cell == self.lake.goal or bool(self.lake.holes >> cell & 1)

    def _arrive(self) -> None:
        """Prepare the parts of the observation that are constant within the episode."""
        goal = self.lake.goal
        holes = cells_text(bits(self.lake.holes), size=self.size)
        place = f"{goal // self.size} {goal % self.size}"
        self._fixed = f" {self.signs.goal} {place} {self.signs.holes} {holes}"

    def _moved(self, before: int) -> None:
        """Record a move. The visual environment draws footprints here."""

    def _observe(self) -> Observation:
        if self.style is FrozenLakeStyle.GRID:
            return grid_text(self.lake, cell=self.cell, grid=self.signs.grid)
        if self.style is FrozenLakeStyle.DIRECTIONS:
            positions = relative_positions(self.lake, cell=self.cell)
            return directions_text(positions, signs=self.signs)
        return f"{self.signs.you} {self.cell // self.size} {self.cell % self.size}{self._fixed}"

    def _resize(self, size: int) -> None:
        check_number(size, name="size", low=2, high=self.largest, whole=True)
        self.size = size
        self.instructions = rules(
            size, slip_probability=self.slip_probability, seen=self._observation_rule()
        )

    def _distances(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Return the bounds of the shortest path in the present lake."""
        longest = self.size * self.size - 1
        corner = 2 * (self.size - 1)
        low = options.get("min_distance", self.min_distance)
        high = options.get("max_distance", self.max_distance)
        high = longest if high is None else high
        check_number(low, name="min_distance", low=1, high=corner, whole=True)
        check_number(high, name="max_distance", low=low, high=longest, whole=True)
        if not self.random_start and high < corner:
            raise ValueError(
                f"max_distance: found {high}, expected at least {corner}, the way from corner to "
                "corner; set random_start=True or a larger max_distance"
            )
        return low, high

    def _observation_rule(self) -> str:
        return observation_rule(self.style, signs=self.signs)

    def _observation_space(self) -> spaces.Space[Any]:
        return spaces.Text(max_length=60 + 8 * self.size**2, charset=TEXT_CHARSET)
