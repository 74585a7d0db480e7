"""The frozen lake: gymnasium's own transition table, map statistics, words and images."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.frozen_lake import FrozenLake
from envs.frozen_lake_map import draw_map, walk_distance
from envs.policies import OptimalPolicy, RandomPolicy
from visual_envs.frozen_lake import FrozenLakeVisual
from visual_envs.frozen_lake_tiles import frozen_lake_tiles
from visual_envs.tiles import Theme

GYMNASIUM_ACTIONS = {"Left": 0, "Down": 1, "Right": 2, "Up": 3}
ROWS = ["SFFF", "FHFH", "FFFH", "HFFG"]
UP, DOWN, LEFT, RIGHT = range(4)


def distribution(outcomes: list[Any]) -> dict[Any, float]:
    summed: dict[Any, float] = defaultdict(float)
    for probability, state, reward, terminated in outcomes:
        summed[int(state), float(reward), bool(terminated)] += probability
    return {outcome: total for outcome, total in summed.items() if total > 0}


def coordinate_distance(rows: list[str]) -> int:
    """Return the fewest moves from S to G, over (row, column) pairs; -1 without a way."""
    cells = {(r, c): letter for r, row in enumerate(rows) for c, letter in enumerate(row)}
    start = next(cell for cell, letter in cells.items() if letter == "S")
    queue, seen = deque([(start, 0)]), {start}
    while queue:
        (row, column), steps = queue.popleft()
        if cells[row, column] == "G":
            return steps
        for cell in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            if cells.get(cell, "H") != "H" and cell not in seen:
                seen.add(cell)
                queue.append((cell, steps + 1))
    return -1


def rows_of(environment: FrozenLake) -> list[str]:
    lake, size = environment.lake, environment.size
    letters = ["H" if lake.holes >> cell & 1 else "F" for cell in range(size * size)]
    letters[lake.start], letters[lake.goal] = "S", "G"
    return ["".join(letters[row * size : (row + 1) * size]) for row in range(size)]


@pytest.mark.parametrize("slippery", [False, True])
@pytest.mark.parametrize("size", [4, 6])
def test_transitions_equal_gymnasium(slippery: bool, size: int) -> None:
    for seed in range(5):
        rows = generate_random_map(size=size, p=0.75, seed=seed)
        reference = FrozenLakeEnv(desc=rows, is_slippery=slippery)
        ours = FrozenLake(size=size, slip_probability=2 / 3 if slippery else 0.0)
        ours.reset(options={"layout": rows})
        for state in range(size * size):
            for action, name in enumerate(ours.action_names):
                expected = distribution(reference.P[state][GYMNASIUM_ACTIONS[name]])
                probabilities = distribution(ours.transitions(state, action))
                assert probabilities.keys() == expected.keys()
                assert all(
                    probabilities[key] == pytest.approx(expected[key]) for key in probabilities
                )


def test_step_frequencies_match_transition_probabilities() -> None:
    environment = FrozenLake(slip_probability=0.5)
    counts: dict[int, int] = defaultdict(int)
    environment.reset(seed=0, options={"layout": ROWS})
    for _ in range(8000):
        environment.reset(options={"layout": ROWS})
        environment.step(RIGHT)
        counts[environment.cell] += 1
    # Meant 1/2; up stays, down leads to cell 4, 1/4 each. Deviation of a share: below 0.006.
    assert counts[1] / 8000 == pytest.approx(0.5, abs=0.025)
    assert counts[0] / 8000 == pytest.approx(0.25, abs=0.025)
    assert counts[4] / 8000 == pytest.approx(0.25, abs=0.025)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**63),
    size=st.integers(2, 8),
    share=st.floats(0.0, 0.5),
    random_start=st.booleans(),
)
def test_every_map_has_a_path_of_the_requested_length(
    seed: int, size: int, share: float, random_start: bool
) -> None:
    low = min(2, 2 * size - 2)
    environment = FrozenLake(
        size=size, hole_fraction=share, min_distance=low, random_start=random_start
    )
    environment.reset(seed=seed)
    rows = rows_of(environment)
    assert environment.difficulty() == coordinate_distance(rows) >= low
    if not random_start:
        assert rows[0][0] == "S" and rows[-1][-1] == "G"
    again = FrozenLake(size=size)
    again.reset(options={"layout": rows})
    assert again.lake == environment.lake and again.state_key() == environment.state_key()


def test_arguments_and_options_bound_the_distance() -> None:
    environment = FrozenLake(min_distance=3, max_distance=4)
    distances = set()
    for seed in range(100):
        environment.reset(seed=seed)
        distances.add(environment.difficulty())
    assert distances == {3, 4}
    environment.reset(seed=0, options={"min_distance": 5, "max_distance": 5})
    assert environment.difficulty() == 5
    environment.reset(seed=1)
    assert environment.difficulty() in (3, 4)


def test_map_distribution_equals_plain_rejection_sampling() -> None:
    """Mean holes and distance equal those of maps drawn in another way, within 5 deviations."""
    rng = np.random.default_rng(0)
    plain = []
    while len(plain) < 2000:
        letters = np.where(rng.random(16) < 0.2, "H", "F")
        start, goal = rng.choice(16, size=2, replace=False)
        letters[start], letters[goal] = "S", "G"
        rows = ["".join(row) for row in letters.reshape(4, 4)]
        if (distance := coordinate_distance(rows)) >= 2:
            plain.append((distance, "".join(rows).count("H")))
    ours = []
    for _ in range(2000):
        lake = draw_map(
            rng, size=4, hole_fraction=0.2, min_distance=2, max_distance=15, random_start=True
        )
        ours.append((lake.distance, lake.holes.bit_count()))
    error = np.sqrt((np.var(plain, axis=0) + np.var(ours, axis=0)) / 2000)
    assert np.all(np.abs(np.mean(plain, axis=0) - np.mean(ours, axis=0)) < 5 * error)


def test_every_pair_of_start_and_goal_occurs() -> None:
    environment = FrozenLake(size=3, hole_fraction=0.0, min_distance=1)
    pairs = set()
    for seed in range(1500):
        environment.reset(seed=seed)
        pairs.add((environment.lake.start, environment.lake.goal))
    assert len(pairs) == 9 * 8


def test_random_policy_success_is_below_30_percent() -> None:
    env = gymnasium.make("ragen/FrozenLake-v0")
    rng, policy, episodes, wins = np.random.default_rng(0), RandomPolicy(), 2000, 0
    for seed in range(episodes):
        env.reset(seed=seed)
        for _ in range(10):
            _, _, terminated, _, info = env.step(policy.act(env, rng))
            if terminated:
                wins += info["success"]
                break
    print(f"random policy on the main environment (10 moves): {wins / episodes:.3f}")
    assert 0.1 < wins / episodes < 0.30


def test_fixed_actions_give_expected_transitions() -> None:
    environment = FrozenLake(step_cost=0.1)
    text, _ = environment.reset(options={"layout": ROWS})
    assert text == "me 0 0 goal 3 3 holes 1 1, 1 3, 2 3, 3 0"
    assert environment.describe() == "me 0 0 goal 3 3 avoid"
    _, reward, terminated, _, info = environment.step(UP)
    assert (reward, terminated) == (pytest.approx(-0.1), False)
    assert not info["action_is_effective"]
    environment.step(DOWN)
    assert environment.describe() == "me 1 0 goal 3 3 avoid Right"
    assert environment.difficulty() == 5
    text, reward, terminated, _, info = environment.step(RIGHT)
    assert terminated and not info["success"] and reward == pytest.approx(-0.1)
    assert environment.difficulty() == -1
    environment.reset(options={"layout": ROWS})
    for action in (DOWN, DOWN, DOWN):
        text, *_ = environment.step(action)
    assert (
        environment.describe() == "me 3 0 goal 3 3 avoid"
    )  # in a hole at the edge, none beside it
    environment.reset(options={"layout": ROWS})
    for action in (RIGHT, RIGHT, DOWN, DOWN, DOWN):
        environment.step(action)
    _, reward, terminated, _, info = environment.step(RIGHT)
    assert terminated and info["success"] and reward == pytest.approx(0.9)
    assert environment.difficulty() == 0


def test_directions_format() -> None:
    environment = FrozenLake(render="directions")
    options = {"layout": ["SFFF", "FHFH", "FFFH", "HFFG"]}
    observation, _ = environment.reset(options=options)
    assert observation == "goal Down Right holes Down Right"
    assert "direction of the goal from you" in environment.instructions
    moved, *_ = environment.step(1)
    assert moved == "goal Down Right holes Right"
    for action in (1, 3, 1, 3):
        moved, *_ = environment.step(action)
    assert moved == "goal Right holes Up Right"
    arrived, *_ = environment.step(3)
    assert arrived == "goal here holes Up"
    assert all(environment.observation_space.contains(text) for text in (observation, arrived))
    other = FrozenLake(render="directions", symbols="other")
    assert other.reset(options=options)[0] == "flag Down Right pits Down Right"


def test_grid_format() -> None:
    environment = FrozenLake(render="grid")
    text, _ = environment.reset(options={"layout": ROWS})
    assert text == "P _ _ _\n_ O _ O\n_ _ _ O\nO _ _ G"
    environment.step(RIGHT)
    assert str(environment.step(DOWN)[0]).splitlines()[1] == "_ X _ O"


def test_optimal_action_accounts_for_slips() -> None:
    """On gymnasium's standard 4x4 map its known best policy walks into the wall at the start."""
    environment = FrozenLake(slip_probability=2 / 3)
    environment.reset(options={"layout": ROWS})
    # Left of the start, so that no slip leads past the holes: gymnasium's optimum is Left.
    assert (
        environment.action_names[OptimalPolicy().act(environment, np.random.default_rng(0))]
        == "Left"
    )


def test_blind_action_ignores_holes() -> None:
    environment, rng = FrozenLake(), np.random.default_rng(0)
    environment.reset(options={"layout": ["SHFF", "HFFF", "FFFF", "FFFG"]})
    actions = {environment.blind_action(rng) for _ in range(50)}
    assert actions == {DOWN, RIGHT}
    assert walk_distance(4, start=0, goal=15, holes=environment.lake.holes) == -1


def test_image_determines_the_state() -> None:
    environment = FrozenLakeVisual()
    images: dict[bytes, str] = {}
    for seed in range(300):
        observation, _ = environment.reset(seed=seed)
        assert observation["text"] == "reach the goal"
        assert observation["image"].shape == (64, 64, 3)
        key = environment.state_key()
        assert images.setdefault(observation["image"].tobytes(), key) == key
    assert len(images) == len(set(images.values()))


def test_move_changes_two_tiles_and_keeps_footprints() -> None:
    for trail in (False, True):
        environment = FrozenLakeVisual(trail=trail)
        start, _ = environment.reset(options={"layout": ROWS})
        moved, *_ = environment.step(RIGHT)
        changed = np.argwhere((start["image"] != moved["image"]).any(axis=2)) // 16
        assert {tuple(cell) for cell in changed} == {(0, 0), (0, 1)}
        back, *_ = environment.step(LEFT)
        assert np.array_equal(start["image"], back["image"]) is not trail
        again, _ = environment.reset(options={"layout": ROWS})
        assert np.array_equal(start["image"], again["image"])


def test_other_symbols_describe_the_same_map() -> None:
    layout = {"layout": ["SFFF", "FHFH", "FFFH", "HFFG"]}
    plain, other = FrozenLake(), FrozenLake(symbols="other")
    assert plain.reset(options=layout)[0] == "me 0 0 goal 3 3 holes 1 1, 1 3, 2 3, 3 0"
    assert other.reset(options=layout)[0] == "walker 0 0 flag 3 3 pits 1 1, 1 3, 2 3, 3 0"
    assert other.describe() == plain.describe() and other.state_key() == plain.state_key()
    assert "You are called walker, the goal flag and the holes pits." in other.instructions
    grid = FrozenLake(symbols="other", render="grid")
    assert grid.reset(options=layout)[0] == "A . . .\n. # . #\n. . . #\n# . . F"
    assert "# is a hole, F is the goal" in grid.instructions
    assert grid.observation_space.contains(grid.reset(options=layout)[0])


def test_night_theme_changes_only_colors() -> None:
    day, night = FrozenLakeVisual(), FrozenLakeVisual(tiles="night")
    images = [
        environment.reset(options={"layout": ROWS})[0]["image"] for environment in (day, night)
    ]
    assert np.abs(images[0].astype(float) - images[1]).mean() > 30
    assert "blue flag" in night.instructions and "green flag" in day.instructions
    with pytest.raises(ValueError, match="tiles: found 'dawn', expected one of day, night"):
        FrozenLakeVisual(tiles="dawn")


@pytest.mark.parametrize("theme", list(Theme))
def test_tiles_differ_clearly(theme: Theme) -> None:
    tiles = frozen_lake_tiles(theme).view(np.uint8).reshape(8, -1).astype(float)
    for first in range(8):
        for second in range(first):
            assert np.abs(tiles[first] - tiles[second]).mean() > 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 1}, "size: found 1, expected a whole number from 2 to 16"),
        ({"size": 4.5}, "size: found 4.5, expected a whole number"),
        ({"hole_fraction": 0.9}, "hole_fraction: found 0.9"),
        ({"slip_probability": -0.1}, "slip_probability: found -0.1"),
        ({"min_distance": 7}, "min_distance: found 7, expected a whole number from 1 to 6"),
        ({"min_distance": 4, "max_distance": 3}, "max_distance: found 3"),
        ({"random_start": False, "max_distance": 4}, "set random_start=True"),
        ({"step_cost": -1.0}, "step_cost: found -1.0"),
        (
            {"render": "pixels"},
            "render: found 'pixels', expected one of coordinates, grid, directions",
        ),
        ({"symbols": "new"}, "symbols: found 'new', expected one of plain, other"),
    ],
)
def test_invalid_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        FrozenLake(**arguments)


def test_invalid_options_raise() -> None:
    environment = FrozenLake()
    with pytest.raises(ValueError, match="min_distance: found 9"):
        environment.reset(options={"min_distance": 9})
    with pytest.raises(ValueError, match="layout: found"):
        environment.reset(options={"layout": ["SF", "FG"]})
    with pytest.raises(RuntimeError, match="set a smaller min_distance"):
        FrozenLake(size=10, hole_fraction=0.8, min_distance=18).reset(seed=0)


def test_min_detour_option():
    env = FrozenLake()
    for seed in range(50):
        env.reset(seed=seed, options={"min_detour": 2})
        me, goal = divmod(env.lake.start, 4), divmod(env.lake.goal, 4)
        assert env.difficulty() >= abs(me[0] - goal[0]) + abs(me[1] - goal[1]) + 2


def test_size_option_draws_a_smaller_lake() -> None:
    lake, seen = FrozenLake(size=6, hole_fraction=0.5), FrozenLakeVisual(size=6, hole_fraction=0.5)
    text, _ = lake.reset(seed=0, options={"size": 4})
    shown, _ = seen.reset(seed=0, options={"size": 4})
    alone = FrozenLake(size=4, hole_fraction=0.5)
    assert text == alone.reset(seed=0)[0] and lake.instructions == alone.instructions
    assert lake.state_key() == seen.state_key() == alone.state_key()
    picture = FrozenLakeVisual(size=4, hole_fraction=0.5).reset(seed=0)[0]["image"]
    assert seen.observation_space.contains(shown)
    assert np.array_equal(shown["image"][:64, :64], picture)
    assert not shown["image"][64:].any() and not shown["image"][:, 64:].any()
    lake.reset(seed=0)
    assert lake.state_key().startswith("6 ") and "6 rows" in lake.instructions
    with pytest.raises(ValueError, match="size: found 7, expected a whole number from 2 to 6"):
        lake.reset(seed=0, options={"size": 7})


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_is_a_shortest_path(seed):
    env = FrozenLake(plans=True)
    env.reset(seed=seed)
    moves = env.plan().split()
    assert len(moves) == env.difficulty()
    for number, move in enumerate(moves):
        *_, info = env.step(env.action_names.index(move))
        assert info["success"] == (number == len(moves) - 1)
    assert env.plan() is None
    env = FrozenLake()
    env.reset(seed=seed)
    assert env.plan() is None
