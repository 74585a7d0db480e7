"""Sokoban: its rules and least pushes against a solver written in another way, words and images."""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.sokoban import Sokoban
from envs.sokoban_rules import shortest_way
from visual_envs.sokoban import SokobanVisual

UP, DOWN, LEFT, RIGHT = range(4)
OFFSETS = {UP: (-1, 0), DOWN: (1, 0), LEFT: (0, -1), RIGHT: (0, 1)}
ROWS = ["######", "#P___#", "#_X__#", "#__O_#", "#____#", "######"]

Cell = tuple[int, int]
Plain = tuple[Cell, frozenset[Cell]]


class PlainSokoban:
    """The rules over sets of (row, column), read off the grid text."""

    def __init__(self, text: str) -> None:
        cells = {
            (row, column): symbol
            for row, line in enumerate(text.split("\n"))
            for column, symbol in enumerate(line.split())
        }
        self.walls = {cell for cell, symbol in cells.items() if symbol == "#"}
        self.targets = frozenset(cell for cell, symbol in cells.items() if symbol in "OBS")
        boxes = frozenset(cell for cell, symbol in cells.items() if symbol in "XB")
        player = next(cell for cell, symbol in cells.items() if symbol in "PS")
        self.state: Plain = (player, boxes)

    def after(self, state: Plain, action: int) -> tuple[Plain, bool]:
        """Return the next state and whether a box was pushed."""
        (row, column), boxes = state
        down, right = OFFSETS[action]
        ahead, beyond = (row + down, column + right), (row + 2 * down, column + 2 * right)
        if ahead in self.walls or (ahead in boxes and (beyond in self.walls or beyond in boxes)):
            return state, False
        if ahead in boxes:
            return (ahead, (boxes - {ahead}) | {beyond}), True
        return (ahead, boxes), False

    def least(self, *, pushes: bool) -> int:
        """Return the fewest pushes, or moves, to the solution; -1 without one (0-1 search)."""
        best = {self.state: 0}
        queue = deque([self.state])
        while queue:
            state = queue.popleft()
            for action in range(4):
                new, pushed = self.after(state, action)
                cost = best[state] + (int(pushed) if pushes else 1)
                if new not in best or cost < best[new]:
                    best[new] = cost
                    (queue.append if pushed or not pushes else queue.appendleft)(new)
        solved = [cost for (_, boxes), cost in best.items() if boxes == self.targets]
        return min(solved, default=-1)


def grid(environment: Sokoban) -> str:
    return str(environment.render())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**63),
    size=st.integers(5, 7),
    boxes=st.integers(1, 2),
    walls=st.integers(0, 3),
)
def test_rules_and_push_counts_equal_a_plain_solver(
    seed: int, size: int, boxes: int, walls: int
) -> None:
    environment = Sokoban(size=size, boxes=boxes, walls=walls, max_pushes=4)
    environment.reset(seed=seed)
    plain = PlainSokoban(grid(environment))
    assert len(plain.walls) == 4 * size - 4 + walls
    assert len(plain.state[1]) == len(plain.targets) == boxes
    assert 1 <= environment.difficulty() == plain.least(pushes=True) <= 4
    rng = np.random.default_rng(seed)
    for _ in range(15):
        action = int(rng.integers(4))
        before = plain.state
        plain.state, _ = plain.after(before, action)
        _, reward, terminated, _, info = environment.step(action)
        now = PlainSokoban(grid(environment))
        assert now.state == plain.state and now.targets == plain.targets
        assert info["action_is_effective"] == (before != plain.state)
        assert info["success"] == terminated == (plain.state[1] == plain.targets)
        assert reward == float(terminated)
        if terminated:
            return
    assert environment.difficulty() == plain.least(pushes=True)
    moves = plain.least(pushes=False)
    assert len(shortest_way(environment.room, environment.state)) == max(0, moves)


def test_optimal_policy_uses_the_fewest_moves() -> None:
    rng = np.random.default_rng(0)
    environment = Sokoban(boxes=2, max_pushes=4)
    for seed in range(15):
        environment.reset(seed=seed)
        fewest = PlainSokoban(grid(environment)).least(pushes=False)
        ends = [environment.step(environment.optimal_action(rng))[2] for _ in range(fewest)]
        assert ends == [False] * (fewest - 1) + [True]
        assert environment.difficulty() == 0


def test_arguments_and_options_bound_the_pushes() -> None:
    environment = Sokoban(min_pushes=2, max_pushes=3)
    pushes = set()
    for seed in range(60):
        environment.reset(seed=seed)
        pushes.add(environment.difficulty())
    assert pushes == {2, 3}
    environment.reset(seed=0, options={"min_pushes": 5, "max_pushes": 5})
    assert environment.difficulty() == 5


def test_fixed_actions_with_ragen_rewards() -> None:
    environment = Sokoban(step_cost=0.1, box_reward=1.0, solved_reward=10.0)
    text, _ = environment.reset(options={"layout": ROWS})
    assert text == "me 1 1 box 2 2 target 3 3 walls none"
    assert environment.describe() == "me 1 1 box 2 2 target 3 3 walls Up Left"
    assert environment.difficulty() == 2
    _, reward, *_, info = environment.step(UP)
    assert reward == pytest.approx(-0.1) and not info["action_is_effective"]
    environment.step(DOWN)
    text, reward, *_ = environment.step(RIGHT)
    assert text == "me 2 2 box 2 3 target 3 3 walls none" and reward == pytest.approx(-0.1)
    for action in (UP, RIGHT):
        environment.step(action)
    text, reward, terminated, _, info = environment.step(DOWN)
    assert text == "me 2 3 box 3 3 target 3 3 walls none"
    assert terminated and info["success"] and reward == pytest.approx(10.9)


def test_moving_a_box_off_its_target_costs_its_reward() -> None:
    rows = ["#######", "#PB___#", "#_X_O_#", "#_____#", "#_____#", "#_____#", "#######"]
    environment = Sokoban(size=7, boxes=2, box_reward=1.0)
    environment.reset(options={"layout": rows})
    assert environment.step(RIGHT)[1] == pytest.approx(-1.0)


def test_deadlock_ends_the_episode_only_if_configured() -> None:
    rows = ["######", "#____#", "#_X__#", "#_P_O#", "#____#", "######"]
    for ends in (False, True):
        environment = Sokoban(end_on_deadlock=ends)
        environment.reset(options={"layout": rows})
        _, _, terminated, _, info = environment.step(UP)  # the box stands at the top wall for good
        assert terminated is ends and not info["success"]
        assert environment.difficulty() == -1


def test_grid_format() -> None:
    environment = Sokoban(render="grid")
    rows = ["######", "#S___#", "#_X_X#", "#__B_#", "#O___#", "######"]
    text, _ = environment.reset(options={"layout": rows})
    assert str(text).replace(" ", "").split("\n") == rows


@pytest.mark.parametrize("tiles", ["day", "night"])
def test_image_determines_the_state(tiles: str) -> None:
    environment = SokobanVisual(boxes=2, max_pushes=3, tiles=tiles)
    images: dict[bytes, str] = {}
    for seed in range(200):
        observation, _ = environment.reset(seed=seed)
        assert observation["image"].shape == (96, 96, 3)
        key = environment.state_key()
        assert images.setdefault(observation["image"].tobytes(), key) == key
    assert len(images) == len(set(images.values()))


def test_text_and_image_environments_have_the_same_dynamics() -> None:
    text, image = gymnasium.make("ragen/Sokoban-v0"), gymnasium.make("ragen/SokobanVisual-v0")
    text.reset(seed=7)
    image.reset(seed=7)
    assert text.unwrapped.state_key() == image.unwrapped.state_key()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 4}, "size: found 4, expected a whole number from 5"),
        ({"boxes": 0}, "boxes: found 0"),
        ({"walls": 14}, "walls: found 14, expected a whole number from 0 to 13"),
        ({"min_pushes": 0}, "min_pushes: found 0"),
        ({"min_pushes": 3, "max_pushes": 2}, "max_pushes: found 2"),
        ({"step_cost": -0.1}, "step_cost: found -0.1"),
        ({"render": "image"}, "render: found 'image'"),
    ],
)
def test_invalid_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Sokoban(**arguments)


def test_impossible_rooms_and_layouts_raise() -> None:
    with pytest.raises(RuntimeError, match="set fewer walls"):
        Sokoban(size=5, walls=0, min_pushes=50).reset(seed=0)
    with pytest.raises(ValueError, match="layout: found"):
        Sokoban().reset(options={"layout": ["######", "#P__O#"]})


def test_box_does_not_push_another_box() -> None:
    rows = ["######", "#PXX_#", "#____#", "#OO__#", "#____#", "######"]
    environment = Sokoban(boxes=2)
    environment.reset(options={"layout": rows})
    before = environment.state_key()
    assert (
        not environment.step(RIGHT)[4]["action_is_effective"] and environment.state_key() == before
    )


def test_other_symbols_describe_the_same_room() -> None:
    plain, other = Sokoban(), Sokoban(symbols="other")
    for environment in (plain, other):
        environment.reset(seed=3)
    texts = [environment.step(0)[0] for environment in (plain, other)]
    words = {"me": "walker", "box": "crate", "target": "mark", "walls": "stones"}
    assert texts[1] == " ".join(words.get(word, word) for word in texts[0].split(" "))
    assert other.describe() == plain.describe() and other.state_key() == plain.state_key()
    assert "a box crate, a target mark and the walls stones" in other.instructions
    grid = Sokoban(symbols="other", render="grid")
    text, _ = grid.reset(seed=3)
    assert text.translate(str.maketrans("W.*C8AE", "#_OXBPS")) == grid.render()
    assert "W is a wall, . is floor" in grid.instructions and text in grid.observation_space


def test_night_tiles_have_other_colors() -> None:
    day, night = SokobanVisual(), SokobanVisual(tiles="night")
    images = [environment.reset(seed=3)[0]["image"] for environment in (day, night)]
    assert np.abs(images[0].astype(float) - images[1]).mean() > 30
    assert "yellow rings" in night.instructions and "red rings" in day.instructions


def test_size_option_draws_a_smaller_room() -> None:
    room, seen, alone = Sokoban(size=8), SokobanVisual(size=8), Sokoban(size=6)
    text, _ = room.reset(seed=0, options={"size": 6})
    shown, _ = seen.reset(seed=0, options={"size": 6})
    assert text == alone.reset(seed=0)[0] and room.instructions == alone.instructions
    assert seen.observation_space.contains(shown)
    assert np.array_equal(shown["image"][:96, :96], SokobanVisual(size=6).reset(seed=0)[0]["image"])
    assert not shown["image"][96:].any() and not shown["image"][:, 96:].any()
    with pytest.raises(ValueError, match="walls: found 7, expected a whole number from 0 to 6"):
        Sokoban(size=8, walls=7).reset(seed=0, options={"size": 5})


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_is_the_way_to_the_next_push_of_a_shortest_solution(seed):
    env = Sokoban(plans=True)
    env.reset(seed=seed)
    rng = np.random.default_rng(0)
    over = False
    while not over:
        plan, boxes, taken = env.plan(), env.state.boxes, []
        while env.state.boxes == boxes:
            row, column = divmod(env.state.player.bit_length() - 1, env.size)
            action = env.optimal_action(rng)
            _, _, over, _, _ = env.step(action)
            taken.append(env.action_names[action])
        *walk, push = taken
        way = f"reach {row} {column} by {' '.join(walk)} " if walk else ""
        assert plan == f"{way}push {push}"


def test_there_is_no_plan_without_a_solution_or_where_none_is_asked_for():
    stuck = ["######", "#PX__#", "#____#", "#__O_#", "#____#", "######"]
    env = Sokoban(plans=True)
    env.reset(options={"layout": stuck})
    assert env.plan() is None
    env = Sokoban()
    env.reset(seed=0)
    assert env.plan() is None
