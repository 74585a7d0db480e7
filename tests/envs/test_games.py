"""2048, blackjack and the pocket cube: rules, and players against figures that are known."""

from __future__ import annotations

import numpy as np
import pytest

from envs.blackjack import HIT, STAND, Blackjack, action_values
from envs.game_2048 import MOVES, Game2048, slid
from envs.pocket_cube import TURNS, PocketCube, distances, turned


def move(rows, name):
    return slid(tuple(map(tuple, rows)), MOVES.index(name))


# ---- 2048


def test_a_tile_is_joined_once_in_a_move():
    assert move([[1, 1, 1, 1]], "Left") == ((2, 2, 0, 0),)
    assert move([[1, 1, 2, 0]], "Right") == ((0, 0, 2, 2),)
    assert move([[1], [0], [1]], "Down") == ((0,), (0,), (2,))
    assert move([[2, 1], [1, 1]], "Up") == ((2, 2), (1, 0))


def test_moves_keep_the_sum_of_the_tiles_and_add_one_where_they_change_the_board():
    env, rng = Game2048(size=4, target=2048), np.random.default_rng(0)
    observation, _ = env.reset(seed=0)
    for _ in range(1000):
        before = total_of(observation)
        observation, _, over, _, info = env.step(env.random_action(rng))
        assert total_of(observation) - before in ((2, 4) if info["action_is_effective"] else (0,))
        if over:
            break
    assert over and "_" not in observation


def total_of(observation):
    return sum(int(tile) for tile in observation.replace(",", "").split() if tile != "_")


def test_the_rules_tell_the_target_of_the_episode():
    env = Game2048(target=32)
    env.reset(seed=0, options={"target": 16})
    assert "Make a tile of 16" in env.instructions
    env.reset(seed=0)
    assert "Make a tile of 32" in env.instructions


def test_the_reward_is_for_the_target_and_for_growth_by_choice():
    env, rng = Game2048(target=16, merge_reward=0.5), np.random.default_rng(0)
    env.reset(seed=0, options={"target": 8})
    rewards, over = [], False
    while not over:
        _, reward, over, _, info = env.step(env.optimal_action(rng))
        rewards.append(reward)
    assert info["success"] and 1.0 < sum(rewards) <= 1.5
    with pytest.raises(ValueError, match="target: found 12"):
        env.reset(seed=0, options={"target": 12})
    # as large as a tile becomes on four cells
    Game2048(size=2, target=32)
    with pytest.raises(ValueError, match="power of 2 from 8 to 32 on 2 by 2 cells"):
        Game2048(size=2, target=64)


# ---- blackjack


def test_basic_strategy():
    """Known decisions with a dealer who stands on all 17 (Thorp, 1966; Sutton and Barto, 2018, figure 5.2)."""

    def best(hand, ace, shown):
        hit, stand = action_values(hand, ace, shown)
        return HIT if hit > stand else STAND

    assert [best(12, False, shown) for shown in (3, 4, 6, 7)] == [HIT, STAND, STAND, HIT]
    assert [best(16, False, shown) for shown in (6, 7, 10, 1)] == [STAND, HIT, HIT, HIT]
    assert [best(17, False, shown) for shown in range(1, 11)] == [STAND] * 10
    # soft 17 and soft 18: the ace counts 1 in the sum
    assert [best(7, True, shown) for shown in (2, 6, 10)] == [HIT] * 3
    assert [best(8, True, shown) for shown in (7, 8, 9, 10)] == [STAND, STAND, HIT, HIT]


def test_the_optimal_player_earns_what_dynamic_programming_says():
    env, rng = Blackjack(), np.random.default_rng(0)
    returns, expected = [], []
    for seed in range(4000):
        env.reset(seed=seed)
        expected.append(max(action_values(env.card_sum, env.has_ace, env.dealer_card)))
        over = False
        while not over:
            _, reward, over, _, _ = env.step(env.optimal_action(rng))
        returns.append(reward)
    assert np.mean(returns) == pytest.approx(np.mean(expected), abs=3 * 0.95 / 4000**0.5)


# ---- the cube


def test_numbers_of_states_by_distance_are_the_known_ones():
    counts = np.bincount(list(distances().values()))
    assert counts.tolist() == [1, 9, 54, 321, 1847, 9992, 50136]


@pytest.mark.parametrize("turn", TURNS)
def test_a_turn_has_its_order_and_touches_twelve_stickers(turn):
    start = bytes(range(24))
    state, order = turned(start, turn), 1
    assert sum(a != b for a, b in zip(start, state, strict=True)) == 12
    while state != start:
        state, order = turned(state, turn), order + 1
    assert order == (2 if "2" in turn else 4)


def test_the_front_faces_upper_row_goes_to_the_right_under_f():
    env = PocketCube(min_turns=1, max_turns=1)
    env.reset(seed=0)
    env.stickers = "".join(color * 4 for color in "WYGBRO").encode()
    observation, *_ = env.step(TURNS.index("F"))
    # a clockwise turn brings the left face's right column to the lower row of the upper face
    assert observation == ("up WW GG down BB YY left GY GY right WB WB front RR RR back OO OO")


def test_difficulty_falls_with_each_optimal_turn():
    env, rng = PocketCube(min_turns=5, max_turns=6), np.random.default_rng(0)
    for seed in range(5):
        env.reset(seed=seed)
        distance, over = env.difficulty(), False
        while not over:
            _, reward, over, _, _ = env.step(env.optimal_action(rng))
            assert env.difficulty() == distance - 1
            distance -= 1
        assert reward == 1.0 and distance == 0
    with pytest.raises(ValueError, match="min_turns: found 4"):
        PocketCube(min_turns=4, max_turns=3)
