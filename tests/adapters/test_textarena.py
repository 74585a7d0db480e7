"""Games of TextArena: players, seeds, news only, moves that the games cannot read."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from support.episodes.hostile import hostile_answers
from support.episodes.players import steps

from envs.adapters.textarena import GAMES, TextArena

pytestmark = pytest.mark.environments


@pytest.mark.parametrize("game", sorted(GAMES))
def test_player_wins_and_seeds_repeat_beside_the_global_generator(game: str) -> None:
    env, other = TextArena(game=game), TextArena(game=game)
    random.seed(5)
    expected = random.Random(5).random()
    for seed in range(10):
        assert steps(env, seed=seed, noise=0.0)[-1].info["success"]
        assert steps(env, seed=seed, noise=0.7) == steps(other, seed=seed, noise=0.7)
    assert random.random() == expected


@pytest.mark.parametrize("game", sorted(GAMES))
def test_trivial_players_earn_little(game: str) -> None:
    env = TextArena(game=game)
    for text in ("[1]", "[1 2 3 4]", "[A B]", "x", ""):
        rewards = []
        for seed in range(20):
            env.reset(seed=seed)
            total, over = 0.0, False
            while not over:
                _, reward, over, _, info = env.step(text)
                total += reward
                assert info["action_is_valid"] or not reward
            rewards.append(total)
        assert np.mean(rewards) <= 0.15


def test_observations_hold_the_news_only() -> None:
    env = TextArena(game="GuessTheNumber")
    assert env.reset(seed=0)[0] == "begin"
    number = env.game.game_number
    text, reward, over, _, info = env.step("1" if number > 1 else "2")
    assert text in ("The target number is higher.", "The target number is lower.")
    assert (reward, over) == (0.0, False) and info["action_is_valid"]
    again = env.step("1" if number > 1 else "2")
    assert not again[4]["action_is_valid"] and not again[2]
    assert env.step(str(number))[1:3] == (1.0, True)


@pytest.mark.parametrize("game", [*sorted(GAMES), "LightsOut", "2048", "Sudoku"])
def test_hostile_moves_do_no_harm(game: str) -> None:
    env, rng = TextArena(game=game), np.random.default_rng(0)
    env.reset(seed=0)
    over = False
    for number, text in enumerate(hostile_answers(rng, 1000)):
        if over:
            env.reset(seed=number)
        observation, reward, over, _, _ = env.step(text)
        assert reward == 0 and str(observation).encode()
        assert len(observation) < 5000


def test_games_that_cannot_be_played_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="game=TicTacToe: "):
        TextArena(game="TicTacToe")
    with pytest.raises(
        ValueError, match="game: found 'Tic' with version '', expected one of 2048, "
    ):
        TextArena(game="Tic")
    small = TextArena(settings={"max_number": 5})
    assert "between 1 and 5" in small.reset(seed=0)[0]
    env = TextArena(game="LightsOut")
    env.reset(seed=0)
    with pytest.raises(NotImplementedError, match="have a policy"):
        env.optimal_action(np.random.default_rng(0))


def test_a_random_code_of_a_large_game_is_drawn_without_a_list_of_all() -> None:
    env = TextArena(game="Mastermind", version="-extreme")
    env.reset(seed=0)
    began, rng = time.process_time(), np.random.default_rng(0)
    codes = {env.random_action(rng) for _ in range(100)}
    assert len(codes) > 90 and time.process_time() - began < 5
    assert env.step(codes.pop())[4]["action_is_valid"]
